# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""VeRL's rollout finds the memory free that asynchronous saves have copied into."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.modules import is_installed
from testing.ranks import RankPool
from tests.core import oracle
from tests.verl import waking_cases
from tests.verl.tiny import Setup

pytestmark = [
    pytest.mark.bridge,
    pytest.mark.skipif(not is_installed("ray"), reason="needs ray, which VeRL's workers import"),
]

STEPS = 3
FEW, MANY = 1 << 16, 1 << 19
"""Bytes; a rank writes more than many."""


@pytest.fixture
def beside(source: str, tmp_path: Path) -> Setup:
    """A run that saves beside its training."""
    contents = {"save_contents": ["optimizer", "extra", "model"], "async_save": True}
    return Setup(source, str(tmp_path / "run"), checkpoint=contents)


def test_a_rollout_that_wakes_finds_none_of_it(beside: Setup, verl_ranks: RankPool) -> None:
    """And the next save takes as much again."""
    for seen in verl_ranks.run(waking_cases.wake_after_a_save, beside, "naive"):
        assert seen["saved"][0] > seen["empty"] + MANY, "the test shows nothing"
        assert seen["found"].keys() == {"weights", "kv_cache"}
        assert all(found < seen["empty"] + FEW for found in seen["found"].values())
        assert all(found < seen["empty"] + FEW for found in seen["woken"])
        assert all(abs(one - other) < FEW for one, other in zip(seen["saved"], seen["again"], strict=True))
        assert seen["weights"][0] > 0


def test_a_rollout_elsewhere_takes_nothing_from_the_next_save(beside: Setup, verl_ranks: RankPool) -> None:
    """To give page-locked memory back and take it again costs time."""
    for seen in verl_ranks.run(waking_cases.wake_after_a_save, beside, "nccl"):
        assert seen["found"] == {}
        assert seen["woken"] == seen["saved"]
        assert seen["weights"][1] > 0


def test_a_save_that_goes_on_keeps_no_rollout_waiting_and_gives_it_back_itself(
    beside: Setup, verl_ranks: RankPool
) -> None:
    for seen in verl_ranks.run(waking_cases.wake_during_a_save, beside):
        assert seen["goes on"]
        assert all(found > MANY for found in seen["during"])
        assert all(found < during - MANY for found, during in zip(seen["written"], seen["during"], strict=True))
        assert all(found > MANY for found in seen["again"])


def test_saves_between_wakes_are_what_saves_at_once_would_have_been(beside: Setup, verl_ranks: RankPool) -> None:
    """Whoever comes first, the end of a save that is to give it back, or the next save."""
    at_once = beside.on(directory=f"{beside.directory}-at-once", checkpoint=beside.checkpoint | {"async_save": False})
    for setup in (at_once, beside):
        verl_ranks.run(waking_cases.train, setup, STEPS)
    for number in range(1, STEPS + 1):
        place = f"global_step_{number}/actor/model/dist_ckpt"
        whole, other = (oracle.on_disk(Path(setup.directory) / place) for setup in (at_once, beside))
        assert whole == other


def test_what_is_replaced_is_called_as_before_and_put_back(verl_ranks: RankPool) -> None:
    """And a VeRL without it, or with another one, is left alone."""
    (found,) = verl_ranks.run(waking_cases.replaced_and_put_back, ranks=1)
    assert [name for name, holds in found.items() if not holds] == []
