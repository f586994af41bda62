# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Wrappers that torch puts around modules: a checkpoint is the same with and without them, in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.ranks import RankPool
from tests.core import oracle, wrapped
from tests.core.test_failures import same_on_all
from tests.upstream import is_before

EXPERT, TENSOR = wrapped.MIXED.on(expert=2), wrapped.MIXED.on(tensor=2)


def test_a_checkpoint_moves_between_wrapped_and_plain_models(megatron_ranks: RankPool, tmp_path: Path) -> None:
    first, second, third = (str(tmp_path / name) for name in "abc")
    live, *_ = megatron_ranks.run(wrapped.train_and_save, first, EXPERT, wrapped.wrap_all, ranks=2)
    assert megatron_ranks.run(wrapped.load_and_save, first, second, TENSOR, None, ranks=2) == [live] * 2
    assert megatron_ranks.run(wrapped.load_and_save, second, third, TENSOR, wrapped.wrap_all, ranks=2) == [live] * 2
    found = oracle.on_disk(first)
    assert {key: digest for key, digest in found.items() if not key.endswith(".step")}.items() == live.items()
    assert oracle.on_disk(second) == oracle.on_disk(third) == found


def test_a_fused_layer_in_an_unknown_wrapper_is_refused(megatron_ranks: RankPool, tmp_path: Path) -> None:
    text = same_on_all(megatron_ranks.run(wrapped.save_hidden, str(tmp_path / "c"), ranks=2), "FamilyError")
    assert "decoder.layers.0.self_attention.in_proj.inner.weight" in text
    assert "Unknown" in text
    assert "gated_delta_net" in text


@pytest.mark.skipif(is_before("megatron-core", "0.19"), reason="megatron-core 0.18 has no Megatron-FSDP v2")
def test_a_model_under_megatron_fsdp_v2_is_refused_by_name(megatron_ranks: RankPool, tmp_path: Path) -> None:
    saved = megatron_ranks.run(wrapped.save_under_second_version, str(tmp_path / "c"), ranks=2)
    text = same_on_all(saved, "ConfigurationError")
    assert "found a model under Megatron-FSDP v2 (megatron_fsdp.experimental)" in text
    assert "Version 2 is not supported yet" in text
