# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Asynchronous saves: what is saved is what was there at the call, whatever training does meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mbridge_fsdp_ckpt.opening import open_checkpoint
from mbridge_fsdp_ckpt.settings import LEAST_STAGING, Settings
from mbridge_fsdp_ckpt.tools.timeline.html import draw_html
from mbridge_fsdp_ckpt.tools.timeline.lanes import timeline
from testing.models import Recipe
from testing.ranks import RankPool
from tests.core import beside, oracle
from tests.soak.kill import iteration

SMALL = Recipe(layers=1)
STEPS = 10


def content(directory: Path) -> tuple[oracle.Digests, Any, int]:
    """All tensors, rank 0's values, and chunks."""
    metadata = open_checkpoint(directory).metadata
    return oracle.on_disk(directory), metadata.values, metadata.chunks


@pytest.mark.parametrize("recipe", [SMALL.on(offload=0.5), SMALL.on(experts=2, strategy="no_shard")], ids=str)
def test_a_save_after_every_step_has_what_a_twin_saves_that_waits(
    recipe: Recipe, megatron_ranks: RankPool, tmp_path: Path
) -> None:
    both = {}
    for name, background in (("waiting", False), ("beside", True)):
        arguments = str(tmp_path / name), recipe, STEPS, Settings(), background
        both[name] = megatron_ranks.run(beside.save_every_step, *arguments, ranks=2)

    assert both["beside"] == both["waiting"], "training goes on as it would, and each step waited for the snapshot"
    seen = set()
    for number in range(1, STEPS + 1):
        found, expected = (content(iteration(tmp_path / name, number)) for name in ("beside", "waiting"))
        assert found == expected
        seen.add(str(sorted(found[0].items())))
    assert len(seen) == STEPS, "every step changes something"
    drawn = timeline(iteration(tmp_path / "beside", STEPS))
    assert [list(lane.seconds)[:3] for lane in drawn.lanes] == [["wait", "plan", "agree"]] * 2
    assert b"wait" in draw_html(drawn).encode()


def test_as_little_staging_memory_as_may_be_is_enough(megatron_ranks: RankPool, tmp_path: Path) -> None:
    recipe = SMALL.on(hidden=1024)
    for name, settings in (("little", Settings(staging_limit=LEAST_STAGING)), ("all", Settings())):
        megatron_ranks.run(beside.save_every_step, str(tmp_path / name), recipe, 3, settings, True, ranks=1)
    size = (iteration(tmp_path / "all", 1) / "__0_0.distcp").stat().st_size
    assert size > 2 * LEAST_STAGING
    for number in (1, 2, 3):
        little, plenty = (content(iteration(tmp_path / name, number)) for name in ("little", "all"))
        assert little == plenty


@pytest.mark.parametrize("limit", [None, 2 * LEAST_STAGING], ids=["all", "32 MiB"])
def test_staging_memory_is_bounded_and_given_back(limit: int | None, megatron_ranks: RankPool, tmp_path: Path) -> None:
    [seen] = megatron_ranks.run(beside.memory, str(tmp_path), limit, ranks=1)
    size = (iteration(tmp_path, 1) / "__0_0.distcp").stat().st_size
    allowed = limit or size
    few = 1 << 20
    for both in (seen["saved"], seen["again"]):
        assert all(allowed * 0.9 < found < allowed + few for found in both), "the same memory, seen by both"
    assert all(found < few for found in seen["released"])
