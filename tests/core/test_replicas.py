# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Tensors of which ranks hold copies: each is written once whoever holds it, or the save is refused on all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from mbridge_fsdp_ckpt.opening import open_checkpoint
from testing.models import Recipe
from testing.ranks import RankPool
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
    assert open_checkpoint(tmp_path / "c").metadata.keys[RARE].shape == (6,)
    loaded = megatron_ranks.run(replicas.load_a_buffer_on_one_rank, str(tmp_path / "c"), ranks=2)
    assert sorted(loaded, key=str) == [None, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]


def test_a_tensor_without_elements_is_saved_and_loaded(megatron_ranks: RankPool, tmp_path: Path) -> None:
    seen = megatron_ranks.run(replicas.save_and_load_without_elements, str(tmp_path / "c"), ranks=2)
    assert [rank["error"] for rank in seen] == [None] * 2
    keys = open_checkpoint(tmp_path / "c").metadata.keys
    shapes = {name: keys[f"model.module.{name}"].shape for name in ("nothing", "no_rows", "no_columns")}
    assert shapes == {"nothing": (0,), "no_rows": (0, 4), "no_columns": (3, 0)}


MODEL = replicas.SMALL
TENSOR, EXPERTS = MODEL.on(tensor=2), MODEL.on(experts=4, tensor=2, expert=2)
HYBRID = MODEL.on(instances=2)


@pytest.mark.parametrize(
    "recipe",
    [TENSOR, EXPERTS, HYBRID, HYBRID.on(outer="optim"), MODEL.on(strategy="no_shard"), MODEL.on(offload=0.5)],
    ids=["TP 2", "TP 2, EP 2", "hybrid", "hybrid, outer sharded", "no_shard", "offload"],
)
def test_copies_of_a_real_run_are_alike(recipe: Recipe, megatron_ranks: RankPool, tmp_path: Path) -> None:
    seen = megatron_ranks.run(replicas.save_with_a_changed_copy, str(tmp_path / "c"), recipe, "", "error", ranks=4)
    assert [(rank["error"], rank["logged"]) for rank in seen] == [(None, [])] * 4, seen[0]["text"]


@pytest.mark.parametrize(
    ("recipe", "changed"),
    [
        pytest.param(TENSOR, "final_layernorm.weight", id="a norm under tensor parallelism"),
        pytest.param(HYBRID, "weight", id="hybrid-sharded weights"),
        pytest.param(TENSOR, "counted", id="a buffer"),
    ],
)
def test_a_copy_that_differs_is_named(recipe: Recipe, changed: str, megatron_ranks: RankPool, tmp_path: Path) -> None:
    warned = megatron_ranks.run(
        replicas.save_with_a_changed_copy, str(tmp_path / "c"), recipe, changed, "warn", ranks=4
    )
    assert [rank["error"] for rank in warned] == [None] * 4
    assert [len(rank["logged"]) for rank in warned] == [1, 0, 0, 0]
    assert any(f"model.{key}" in warned[0]["logged"][0] for key in warned[0]["keys"])
    assert "differs from rank" in warned[0]["logged"][0]
    refused = megatron_ranks.run(
        replicas.save_with_a_changed_copy, str(tmp_path / "d"), recipe, changed, "error", ranks=4
    )
    assert [rank["error"] for rank in refused] == ["ReplicaMismatchError"] * 4
    assert len({rank["text"] for rank in refused}) == 1
    assert "rank" in refused[0]["text"]
    assert cases.names_in(tmp_path) == ["c"]
