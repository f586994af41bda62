# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The steps of a save once it is planned: ranks agree, each writes, all meet, rank 0 commits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mbridge_fsdp_ckpt.coordination.coordination import Coordination
from mbridge_fsdp_ckpt.coordination.outcome import Outcome
from mbridge_fsdp_ckpt.coordination.rounds import Arrival
from mbridge_fsdp_ckpt.coverage.plans import DisputedPlans
from mbridge_fsdp_ckpt.coverage.replicas import DifferingCopies
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.saving import writer
from mbridge_fsdp_ckpt.saving.commit import Job, Place
from mbridge_fsdp_ckpt.saving.result import SaveResult
from mbridge_fsdp_ckpt.saving.write_plan import Elements, PlanComparison, WritePlan
from mbridge_fsdp_ckpt.saving.writer import CommitRound, Written


def run(
    job: Job, planned: Outcome[WritePlan], elements: Callable[[], Elements], watching: writer.Watching
) -> SaveResult:
    """Save what was planned.

    Args:
        job: The save.
        planned: The write plan of this rank, or the error that it failed with.
        elements: Returns the elements of the plan's blocks; called once all ranks have agreed.
        watching: The clock of the save, and the receiver of its progress.

    Raises:
        CheckpointError: The save failed.  The same on every rank.
    """
    coordination, phases = job.coordination, watching.phases
    try:
        with phases("agree"):
            place = _agree_to_write(job, planned)
        with coordination.at_work():
            own = planned.value
            write = partial(writer.write, own, elements(), place, coordination, job.settings.replicas, watching)
            written = Outcome.of(write, coordination.rank, "writing chunks")
        try:
            with phases("commit"):
                total = _commit(job, own, written, place)
        except CheckpointError:
            writer.roll_back(place, coordination)
            raise
    finally:
        job.clean_up()
        coordination.close()
    return SaveResult(written.value["result"]["bytes"], total, phases.seconds, phases.elapsed, phases.elapsed)


def give_up(coordination: Coordination, error: CheckpointError) -> int:
    """Bring an error to the meetings of a save, in place of a process that cannot continue.

    Returns:
        The bytes that all ranks wrote, if the save was committed nevertheless.

    Raises:
        CheckpointError: This error, or the error of another rank that came first.
    """
    try:
        decided = coordination.meet(Arrival(PlanComparison.phase, error))
        if decided["place"] is None:
            coordination.meet(Arrival(DisputedPlans.phase, error))
        decided = coordination.meet(Arrival(CommitRound.phase, error))
        if decided["sums"]:
            coordination.meet(Arrival(DifferingCopies.phase, error))
        return int(decided["bytes"])
    finally:
        coordination.close()


def _agree_to_write(job: Job, planned: Outcome[WritePlan]) -> Place:
    """Hold the first meeting, and a second one if sums are not zero; returns where to write."""
    coordination = job.coordination
    decided = coordination.meet(PlanComparison(planned, job.begin))
    if decided["place"] is not None:
        return decided["place"]
    return coordination.meet(DisputedPlans(coordination.rank, planned.value.blocks, decided["sums"], job.begin))


def _commit(job: Job, own: WritePlan, written: Outcome[Written], place: Place) -> int:
    """Hold the commit round, and a further meeting if sums are not zero; returns the bytes that all ranks wrote."""
    coordination, choice = job.coordination, job.settings.replicas
    committing = CommitRound(job, own, place, written)
    decided = coordination.meet(committing)
    if sums := decided["sums"]:
        coordination.meet(DifferingCopies(coordination.rank, own.copies, sums, committing.finish, choice))
    coordination.end()
    return decided["bytes"]
