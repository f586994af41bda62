# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""An estimate: all ranks counted, some of them planned as a save plans them, and both compared."""

from __future__ import annotations

import time
from dataclasses import dataclass

from mbridge_fsdp_ckpt.errors import InternalError
from mbridge_fsdp_ckpt.tools.balance import Balance, RankShare, balance
from mbridge_fsdp_ckpt.tools.estimate.described import JobToEstimate
from mbridge_fsdp_ckpt.tools.estimate.job import Tally, count_stage
from mbridge_fsdp_ckpt.tools.estimate.layout import JobLayout
from mbridge_fsdp_ckpt.tools.estimate.model import Subject
from mbridge_fsdp_ckpt.tools.estimate.rank import RankPlan, plan_rank
from mbridge_fsdp_ckpt.tools.estimate.world import as_rank


@dataclass(frozen=True, slots=True)
class Estimate:
    """What was found.

    Args:
        name: What the job was made from.
        layout: Its layout.
        tally: What each rank has to do.
        subjects: Its model, by pipeline stage.
        plans: Of those ranks that were planned as a save plans them.
        seconds: What the estimate took.
    """

    name: str
    layout: JobLayout
    tally: Tally
    subjects: tuple[Subject, ...]
    plans: dict[int, RankPlan]
    seconds: float

    @property
    def balance(self) -> Balance:
        """How evenly the ranks share the bytes."""
        pairs = enumerate(zip(self.tally.bytes.tolist(), self.tally.chunks.tolist(), strict=True))
        return balance({rank: RankShare(size, chunks) for rank, (size, chunks) in pairs})

    @property
    def planning(self) -> tuple[float, float]:
        """Seconds that planning took the slowest of these: for the first save, and for a later one."""
        seconds = [plan.seconds for plan in self.plans.values()]
        return max(first for first, _ in seconds), max(later for _, later in seconds)


def estimate(job: JobToEstimate) -> Estimate:
    """Count what each rank of a job would write.

    Raises:
        ConfigurationError: The model cannot be built in that layout.
        LayoutError, FamilyError: As a save does.
        InternalError: What is counted is not what a save plans.
    """
    start = time.perf_counter()
    layout, tally = job.layout, Tally(job.layout.world)
    subjects: list[Subject] = []
    plans: dict[int, RankPlan] = {}
    for stage in range(layout.pipeline):
        first = stage * layout.stage_world
        with as_rank(layout, first):
            subjects.append(job.subject())
            count_stage(subjects[stage], stage, tally)
            plans[first] = _planned(subjects[stage], first, tally)
    last = layout.world - 1
    for rank in sorted({last, last - layout.stage_world // 2} - plans.keys()):
        with as_rank(layout, rank):
            plans[rank] = _planned(subjects[rank // layout.stage_world], rank, tally)
    return Estimate(job.name, layout, tally, tuple(subjects), plans, time.perf_counter() - start)


def _planned(subject: Subject, rank: int, tally: Tally) -> RankPlan:
    plan = plan_rank(subject, rank)
    if plan.work != tally.work(rank):
        raise InternalError(
            expected=f"{plan.work}, as a save plans it",
            found=f"{tally.work(rank)}, counted for all ranks",
            remedy="Report it with the configuration and the layout.",
            rank=rank,
        )
    return plan
