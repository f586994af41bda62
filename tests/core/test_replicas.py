"""Tensors of which ranks hold copies: each is written once whoever holds it, or the save is refused on all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from mbridge_fsdp_ckpt.storage.source import open_checkpoint
from mbridge_fsdp_ckpt.testing.ranks import RankPool
from tests.core import cases, replicas

RARE = "model.module.rare"


@pytest.mark.quick
def test_a_buffer_that_only_another_rank_than_its_writer_holds_is_refused(
    megatron_ranks: RankPool, tmp_path: Path
) -> None:
    seen = megatron_ranks.run(replicas.save_with_a_buffer_on_one_rank, str(tmp_path / "c"), on_writer=False, ranks=2)
    assert [rank["error"] for rank in seen] == ["PlanDisagreementError"] * 2
    assert len({rank["text"] for rank in seen}) == 1
    assert f"{RARE}: no rank writes it" in seen[0]["text"]
    assert cases.names_in(tmp_path) == []


def test_a_buffer_that_only_its_writer_holds_is_saved_and_loaded(megatron_ranks: RankPool, tmp_path: Path) -> None:
    seen = megatron_ranks.run(replicas.save_with_a_buffer_on_one_rank, str(tmp_path / "c"), on_writer=True, ranks=2)
    assert [rank["error"] for rank in seen] == [None] * 2
    assert open_checkpoint(tmp_path / "c").keys[RARE].shape == (6,)
    loaded = megatron_ranks.run(replicas.load_a_buffer_on_one_rank, str(tmp_path / "c"), ranks=2)
    assert sorted(loaded, key=str) == [None, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]


def test_a_tensor_without_elements_is_saved_and_loaded(megatron_ranks: RankPool, tmp_path: Path) -> None:
    seen = megatron_ranks.run(replicas.save_and_load_without_elements, str(tmp_path / "c"), ranks=2)
    assert [rank["error"] for rank in seen] == [None] * 2
    keys = open_checkpoint(tmp_path / "c").keys
    shapes = {name: keys[f"model.module.{name}"].shape for name in ("nothing", "no_rows", "no_columns")}
    assert shapes == {"nothing": (0,), "no_rows": (0, 4), "no_columns": (3, 0)}
