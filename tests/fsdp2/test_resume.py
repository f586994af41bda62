# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A model under FSDP2 is saved and resumed, in its own layout and in others, where Megatron cannot be imported."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fsdp2 import cases
from tests.fsdp2.conftest import Worlds
from tests.fsdp2.models import Layout

FSDP, TP, HSDP = Layout(), Layout(tensor=2), Layout(replicas=2)


def unlike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """What is not the same, bit for bit, or is not in both."""
    both = one.keys() & other.keys()
    return sorted({*(one.keys() ^ other.keys()), *(name for name in both if not same(one[name], other[name]))})


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bool(torch.equal(one, other))


def test_nothing_of_this_needs_megatron(worlds: Worlds) -> None:
    assert worlds[2].run(cases.megatron_is_there) == [False, False]


@pytest.mark.parametrize(
    ("layout", "world", "optimizer"),
    [
        pytest.param(FSDP, 2, "AdamW", id="FSDP"),
        pytest.param(FSDP, 2, "AdamW foreach", id="foreach"),
        pytest.param(FSDP, 2, "AdamW fused", id="fused"),
        pytest.param(FSDP, 2, "AdamW capturable", id="capturable"),
        pytest.param(FSDP, 2, "AdamW amsgrad", id="amsgrad"),
        pytest.param(FSDP, 2, "SGD", id="no state"),
        pytest.param(FSDP, 2, "SGD momentum", id="momentum"),
        pytest.param(Layout(compiled=True, recomputed=True), 2, "AdamW", id="compiled and recomputed"),
        pytest.param(Layout(mixed=True), 2, "AdamW", id="mixed precision"),
        pytest.param(Layout(offloaded=True), 2, "AdamW", id="CPU offload"),
        pytest.param(Layout(dim=1), 2, "AdamW", id="dimension 1"),
        pytest.param(TP, 2, "AdamW", id="TP"),
        pytest.param(HSDP, 4, "AdamW", id="HSDP"),
        pytest.param(TP, 4, "AdamW", id="TP x FSDP"),
        pytest.param(Layout(tensor=2, dim=1), 4, "SGD momentum", id="TP x FSDP of dimension 1"),
        pytest.param(Layout(experts=True), 4, "AdamW", id="a mesh for experts"),
    ],
)
def test_a_resumed_run_repeats_the_uninterrupted_one(
    layout: Layout, world: int, optimizer: str, worlds: Worlds, tmp_path: Path
) -> None:
    ranks = worlds[world]
    saved = ranks.run(cases.save, str(tmp_path / "c"), layout, optimizer)
    loaded = ranks.run(cases.load, str(tmp_path / "c"), layout, optimizer)
    for (before, through), (after, resumed, values) in zip(saved, loaded, strict=True):
        assert unlike(before, after) == []
        assert through == resumed
        assert values == {"step": 2}


@pytest.mark.parametrize(
    ("saved_in", "world", "loaded_in"),
    [
        pytest.param(TP, 4, [(FSDP, 1), (TP, 2), (HSDP, 4)], id="TP x FSDP"),
        pytest.param(HSDP, 4, [(FSDP, 2), (TP, 4)], id="HSDP"),
        pytest.param(FSDP, 2, [(FSDP, 1), (Layout(tensor=2, dim=1), 4)], id="FSDP"),
        pytest.param(Layout(compiled=True, recomputed=True), 2, [(Layout(experts=True), 4)], id="compiled"),
    ],
)
def test_it_loads_in_other_layouts(
    saved_in: Layout, world: int, loaded_in: list[tuple[Layout, int]], worlds: Worlds, tmp_path: Path
) -> None:
    directory: Any = str(tmp_path / "c")
    (saved, _), *_ = worlds[world].run(cases.save, directory, saved_in, "AdamW")
    for layout, other in loaded_in:
        shared = partial(cases.load, shared=layout.replicas > 1)  # replicas read for each other
        for after, _, _ in worlds[other].run(shared, directory, layout, "AdamW"):
            assert unlike(saved, after) == [], (layout, other)


def test_ranks_with_the_same_are_found_on_equal_meshes(worlds: Worlds) -> None:
    """Torch makes DTensors on meshes of models that were there before: their roots are equal, and not the same."""
    everybody = (0, 1, 2, 3)
    assert worlds[4].run(cases.holders_of_equal_meshes) == [
        [(0, 1), everybody, everybody],
        [(0, 1), everybody, everybody],
        [(2, 3), everybody, everybody],
        [(2, 3), everybody, everybody],
    ]


@pytest.mark.parametrize(("layout", "optimizer"), [(FSDP, "AdamW"), (Layout(mixed=True), "SGD momentum")])
def test_an_asynchronous_save_has_what_there_was_at_the_call(
    layout: Layout, optimizer: str, worlds: Worlds, tmp_path: Path
) -> None:
    """Training goes on while it copies; then a model that has computed with other weights computes with these."""
    saved = worlds[2].run(partial(cases.save, beside=True), str(tmp_path / "c"), layout, optimizer)
    loaded = worlds[2].run(cases.load, str(tmp_path / "c"), layout, optimizer)
    for (before, through), (after, resumed, _) in zip(saved, loaded, strict=True):
        assert unlike(before, after) == []
        assert through == resumed


def test_weights_alone(worlds: Worlds, tmp_path: Path) -> None:
    (saved, _), *_ = worlds[2].run(cases.save, str(tmp_path / "c"), FSDP, "AdamW")
    for after, state in worlds[2].run(cases.load_weights, str(tmp_path / "c"), FSDP):
        assert unlike({name: value for name, value in saved.items() if name.startswith("model.")}, after) == []
        assert state == []


def test_a_reader_of_ones_own_is_asked_and_an_error_lists_all(worlds: Worlds, tmp_path: Path) -> None:
    (saved, errors), *others = worlds[2].run(cases.save_by_a_reader_of_ones_own, str(tmp_path / "c"))
    for said in (errors, *(errors for _, errors in others)):
        for error, found in zip(said, ("ByTheName", "Linear"), strict=True):
            assert "Megatron-FSDP v1, or torch's FSDP2 (fully_shard) or DTensor parallelism" in error
            assert f"found {found}" in error
    for after, _, _ in worlds[2].run(cases.load, str(tmp_path / "c"), FSDP, "AdamW"):
        assert unlike(saved, after) == []


def test_what_cannot_be_saved_is_refused_by_name(worlds: Worlds) -> None:
    for found in worlds[2].run(cases.refused):
        assert "blocks.0.up.weight] expected a local tensor of shape" in found["a shard of another shape"]
        assert "ignored] expected a DTensor that is sharded or replicated" in found["a partial sum"]
        assert "ignored] expected the state dict to have the model's own" in found["a tensor that a hook made"]
        assert "expected values without 'optimizer'" in found["a value of the name of param groups"]
