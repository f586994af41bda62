# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Two keys that fill one memory: what the model saves itself comes back, what would lose one of them is refused."""

from __future__ import annotations

from pathlib import Path

from testing.ranks import RankPool
from tests.core import aliased, cases
from tests.core.test_failures import same_on_all

EMBEDDING, OUTPUT = "model.module.embedding.word_embeddings.weight", "model.module.output_layer.weight"


def test_what_is_untied_does_not_load_into_tied_modules(megatron_ranks: RankPool, tmp_path: Path) -> None:
    target = str(tmp_path / "c")
    untied, *_ = megatron_ranks.run(aliased.save_weights, target, None, ranks=2)
    text = same_on_all(megatron_ranks.run(aliased.load_weights, target, aliased.tie, ranks=2), "KeyMismatchError")
    assert EMBEDDING in text
    assert OUTPUT in text
    assert "Nothing was changed" in text
    chosen, *_ = megatron_ranks.run(aliased.load_weights, target, aliased.tie, "embedding", ranks=2)
    assert chosen[OUTPUT] == chosen[EMBEDDING] == untied[OUTPUT]


def test_tied_modules_get_back_what_they_saved(megatron_ranks: RankPool, tmp_path: Path) -> None:
    first, again = str(tmp_path / "c"), str(tmp_path / "d")
    live, *_ = megatron_ranks.run(aliased.train_and_save, first, ranks=2)
    assert live[OUTPUT] == live[EMBEDDING]
    assert megatron_ranks.run(aliased.load_and_save, first, again, ranks=2) == [live] * 2
    assert cases.names_in(first) == cases.names_in(again)


def test_buffers_that_share_memory(megatron_ranks: RankPool, tmp_path: Path) -> None:
    root = str(tmp_path)
    megatron_ranks.run(aliased.save_buffers, root, ranks=2)
    assert megatron_ranks.run(aliased.load_own_buffers, root, ranks=2) == [dict.fromkeys(aliased.BUFFERS, True)] * 2
    text = same_on_all(
        megatron_ranks.run(aliased.load_other_buffers, root, "apart", "overlapping", ranks=2), "KeyMismatchError"
    )
    assert "model.module.decoder.one" in text
    assert "model.module.decoder.other" in text
