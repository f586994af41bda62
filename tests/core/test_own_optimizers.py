# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Optimizers of somebody's own: what cannot come back is refused by the save, what does not fit by the load."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from testing.modules import is_installed
from testing.ranks import RankPool
from tests.core import cases, own_optimizers
from tests.core.own_optimizers import Lion, Own

needs_engine = pytest.mark.skipif(
    not is_installed("transformer_engine"), reason="FusedAdam is Transformer Engine's, which is not installed"
)


def test_a_save_refuses_state_that_could_not_come_back(megatron_ranks: RankPool, tmp_path: Path) -> None:
    first, second = megatron_ranks.run(own_optimizers.refused_saves, str(tmp_path / "checkpoint"), ranks=2)
    assert first == second
    assert all(text.startswith("UnsupportedStateError: ") for text in first.values()), first
    assert "slot 'left' to be a number" in first["a preconditioner"]
    assert "found a slot named 1." in first["a number as a name"]
    assert "found a slot named 'm.1'" in first["a dot in a name"]
    assert "state of 'global'" in first["global state"]
    assert not list(tmp_path.iterdir())


def test_a_group_gets_back_what_only_steps_put_into_it(megatron_ranks: RankPool, tmp_path: Path) -> None:
    saved, _ = megatron_ranks.run(own_optimizers.save, str(tmp_path), Own, own_optimizers.moments, ranks=2)
    loaded, _ = megatron_ranks.run(own_optimizers.load, str(tmp_path), Own, own_optimizers.moments, ranks=2)
    assert saved["step"] == loaded["step"] == 2
    assert loaded["live"] == saved["live"]


@pytest.fixture(scope="module")
def of_own(megatron_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("own") / "checkpoint"
    megatron_ranks.run(own_optimizers.save, str(directory), Own, own_optimizers.moments, ranks=2)
    return directory


def test_another_class_that_has_not_stepped_is_known_by_its_name(megatron_ranks: RankPool, of_own: Path) -> None:
    results: list[Any] = megatron_ranks.run(own_optimizers.load, str(of_own), Lion, own_optimizers.moments, ranks=2)
    assert results[0] == results[1]
    assert results[0]["error"].startswith("KeyMismatchError: ")
    assert (
        "kept by tests.core.own_optimizers.Own in the checkpoint, tests.core.own_optimizers.Lion here"
        in (results[0]["error"])
    )


def test_a_load_says_which_slots_may_be_copies_of_weights(megatron_ranks: RankPool, of_own: Path) -> None:
    first, second = megatron_ranks.run(own_optimizers.load_weights, str(of_own), ranks=2)
    assert first["unknown"] == second["unknown"] == ("z",)
    assert len(first["said"]) == 1
    assert first["said"][0].startswith("The optimizer keeps z. ")
    assert second["said"] == []


@needs_engine
def test_moments_lose_precision_only_where_somebody_asks(megatron_ranks: RankPool, tmp_path: Path) -> None:
    megatron_ranks.run(cases.train_and_save, str(tmp_path), own_optimizers.MODEL, ranks=2)
    error, _ = megatron_ranks.run(own_optimizers.cast, str(tmp_path), (), ranks=2)
    assert error.startswith("KeyMismatchError: ")
    assert "torch.float32 in the checkpoint, torch.bfloat16 here (allow_cast must name the key)" in error
    assert megatron_ranks.run(own_optimizers.cast, str(tmp_path), ("optimizer.*",), ranks=2) == ["", ""]


def test_slots_that_an_optimizer_does_not_keep_are_refused_or_left_out(
    megatron_ranks: RankPool, tmp_path: Path
) -> None:
    megatron_ranks.run(cases.train_and_save, str(tmp_path), own_optimizers.MODEL, ranks=2)
    errors: list[str] = megatron_ranks.run(own_optimizers.without_momentum, str(tmp_path), (), ranks=2)
    assert errors[0] == errors[1]
    assert "exp_avg: in the checkpoint, torch.optim.sgd.SGD here keeps no exp_avg" in errors[0]
    assert megatron_ranks.run(own_optimizers.without_momentum, str(tmp_path), ("optimizer.*",), ranks=2) == ["", ""]


def test_switches_that_decide_slots_stay_with_the_slots(megatron_ranks: RankPool, tmp_path: Path) -> None:
    (found,) = megatron_ranks.run(own_optimizers.without_amsgrad, str(tmp_path), ranks=1)
    assert found["amsgrad"] is False
    assert math.isfinite(found["loss"])


def test_another_class_is_named_also_where_it_kept_nothing(megatron_ranks: RankPool, tmp_path: Path) -> None:
    """SGD without momentum has no state that could be missed, and its learning rate would be AdamW's."""
    refused, allowed, of_adam = megatron_ranks.run(own_optimizers.of_other_classes, str(tmp_path), ranks=1)[0]
    assert refused.startswith("KeyMismatchError: ")
    assert "dampening, momentum, nesterov, as torch.optim.SGD has them" in refused
    assert "torch.optim.adamw.AdamW" in refused
    assert allowed == of_adam == "loaded, decoupled: {True}"


def test_a_subclass_of_an_optimizer_of_torch_takes_its_state(megatron_ranks: RankPool, tmp_path: Path) -> None:
    saved = megatron_ranks.run(cases.train_and_save, str(tmp_path), own_optimizers.MODEL, 1, ranks=2)
    losses = megatron_ranks.run(own_optimizers.into_a_subclass, str(tmp_path), ranks=2)
    assert losses == [pytest.approx(result["losses"][0], rel=1e-6) for result in saved]


@needs_engine
def test_masters_that_repeat_fp32_weights_are_let_go_and_host_copies_follow_the_weights(
    megatron_ranks: RankPool, tmp_path: Path
) -> None:
    for distances in megatron_ranks.run(own_optimizers.masters_over_fp32, str(tmp_path), ranks=2):
        assert distances
        assert set(distances) == {0.0}


@needs_engine
def test_a_counter_is_not_reset_under_parameters_that_are_left_out(megatron_ranks: RankPool, tmp_path: Path) -> None:
    first, second = megatron_ranks.run(own_optimizers.left_out_counters, str(tmp_path), ranks=2)
    assert first == second
    assert first.startswith("ConfigurationError: ")
    assert "0 of " in first
    assert "which is left out" in first
