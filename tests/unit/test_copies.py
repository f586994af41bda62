# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Which ranks may have written what a rank holds, where more hold copies than it is worth asking."""

from __future__ import annotations

from dataclasses import replace

from mbridge_fsdp_ckpt.live.readers.protocol import Ranks
from mbridge_fsdp_ckpt.live.replicas import MOST_NEAR, ranks_with_copies
from mbridge_fsdp_ckpt.plan.boxes import FlatRange
from mbridge_fsdp_ckpt.plan.layout import Axis, ParameterLayout
from mbridge_fsdp_ckpt.plan.slices import ParameterPlan, plan_parameter


def on_known_ranks(plan: ParameterPlan) -> Ranks:
    """Weights have copies on ranks 90 and 91, norms on ranks 0 to 99."""
    return (90, 91) if plan.layout.replica.count == 2 else tuple(range(100))


def plans(key: str, replica: Axis, count: int) -> list[ParameterPlan]:
    """Those of a rank's parameters that it does not write."""
    layouts = (ParameterLayout(f"{key}{n}", "", (2,), None, Axis(0, 1), FlatRange(0, 2), replica) for n in range(999))
    return [plan for plan in (plan_parameter(layout, None) for layout in layouts) if not plan.slices[0].writes][:count]


def test_ranks_with_most_copies_come_first() -> None:
    held = [*plans("norm", Axis(91, 100), 5), *plans("weight", Axis(1, 2), 6)]
    assert ranks_with_copies(on_known_ranks, held, 91) == [*range(MOST_NEAR - 1), 90]


def test_what_a_rank_writes_or_another_stage_does_leads_to_nobody() -> None:
    own = [plan for replica in (0, 1) for plan in plans("weight", Axis(replica, 2), 3)]
    written = [replace(plan, slices=tuple(replace(p, writes=True) for p in plan.slices)) for plan in own]
    later = [replace(plan, layout=replace(plan.layout, is_copy=True)) for plan in own]
    assert ranks_with_copies(on_known_ranks, [*written, *later], 91) == []
    assert ranks_with_copies(on_known_ranks, own, 91) == [90]
