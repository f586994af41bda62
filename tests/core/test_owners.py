# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Each number of the optimizer has one owner, in force before the first step; a warning names surprises."""

from __future__ import annotations

from pathlib import Path

import pytest

from mbridge_fsdp_ckpt.errors import KeyMismatchError
from mbridge_fsdp_ckpt.integrations.common.restoration import SCHEDULED, saved_schedule
from testing.ranks import RankPool
from tests.core import owners

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
BETAS = "betas (0.9, 0.75) (configured: (0.9, 0.5))"
BOUNDS = "max_lr 1.0 (configured: 0.125), max_lr 2.0 (configured: 0.25)"
DECAY = "end_wd 0.25 (configured: 0.0625)", "start_wd 0.25 (configured: 0.0625)"
DESCRIPTIONS = "WARNING: the checkpoint's numbers are in force, not the configuration's: "


def test_what_the_configuration_owns_is_put_back_where_it_was(megatron_ranks: RankPool) -> None:
    """Half of the way from 0.125, and from 0.25, to 0."""
    [found] = megatron_ranks.run(owners.load, "configuration", scheduled=True, ranks=1)
    assert found["groups"] == [(0.0625, 0.0625, 0.75), (0.125, 0.0625, 0.75)]
    assert found["wd_mult"] == [None, None]
    assert found["stayed"]
    assert found["said"] == [DESCRIPTIONS + BETAS]


def test_what_the_checkpoint_owns_is_in_force_at_once_and_said(megatron_ranks: RankPool) -> None:
    [found] = megatron_ranks.run(owners.load, "checkpoint", scheduled=True, ranks=1)
    assert found["groups"] == [(0.5, 0.75, 0.75), (1.0, 0.75, 0.75)]  # weight decay 0.25 times 3
    assert found["wd_mult"] == [3.0, 3.0]
    assert found["stayed"]
    assert found["said"] == [DESCRIPTIONS + ", ".join([BETAS, DECAY[0], BOUNDS, DECAY[1]])]


@pytest.mark.parametrize(
    ("owner", "groups"),
    [
        ("configuration", [(0.125, 0.5, 0.75)] * 2),
        ("checkpoint", [(0.5, 0.25, 0.75), (1.0, 0.25, 0.75)]),
    ],
)
def test_without_a_schedule_rate_and_decay_have_the_same_owner(
    owner: str, groups: list[tuple[float, float, float]], megatron_ranks: RankPool
) -> None:
    [found] = megatron_ranks.run(owners.load, owner, scheduled=False, ranks=1)
    assert found["groups"] == groups
    assert found["stayed"]


def test_a_checkpoint_without_a_schedule_is_refused() -> None:
    with pytest.raises(KeyMismatchError, match="found a native save"):
        saved_schedule({}, "opt_param_scheduler", found="a native save", remedy="")


def test_the_page_names_every_number_that_a_switch_decides() -> None:
    section = PAGE.read_text().split("## Who owns a number")[1].split("\n## ")[0]
    assert [name for name in SCHEDULED if f"`{name}`" not in section] == []
