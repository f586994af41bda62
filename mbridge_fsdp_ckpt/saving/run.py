# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The steps of a save once it is planned: ranks agree, each writes, all meet, rank 0 commits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mbridge_fsdp_ckpt.coordination.coordination import Coordination
from mbridge_fsdp_ckpt.coordination.messages import nothing
from mbridge_fsdp_ckpt.coordination.outcome import Outcome
from mbridge_fsdp_ckpt.coverage import plans, replicas
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.saving import write_plan, writer
from mbridge_fsdp_ckpt.saving.commit import Job
from mbridge_fsdp_ckpt.saving.result import SaveResult
from mbridge_fsdp_ckpt.saving.write_plan import Elements, WritePlan


def run(
    job: Job, planned: Outcome[WritePlan], elements: Callable[[], Elements], watching: writer.Watching
) -> SaveResult:
    """Save what was planned.

    Args:
        job: The save.
        planned: What this rank writes, or why it can't.
        elements: Of its blocks; asked for once all ranks have agreed.
        watching: See there.

    Raises:
        CheckpointError: The same on every rank.  See `checkpoint.save`.
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
    """Bring an error to the meetings of a save, in the place of a process that cannot go on.

    Returns:
        The bytes that all ranks wrote, if the save was committed all the same.

    Raises:
        CheckpointError: This error, or the one that the ranks have agreed on before.
    """
    try:
        decided: Any = coordination.meet("comparison of plans", error, nothing, nothing)
        if decided["place"] is None:
            coordination.meet("disagreement on the plan", error, nothing, nothing)
        decided = coordination.meet("commit", error, nothing, nothing)
        if decided["differing"]:
            coordination.meet("comparison of copies", error, nothing, nothing)
        return int(decided["bytes"])
    finally:
        coordination.close()


def _agree_to_write(job: Job, planned: Outcome[WritePlan]) -> writer.Place:
    """The first meeting, and the one that it may call for; returns where to write."""
    coordination = job.coordination
    message = planned.message(write_plan.announce)
    decided = coordination.meet("comparison of plans", message, job.decide_plans, write_plan.combine)
    if decided["place"] is not None:
        return decided["place"]
    disputed = write_plan.disputed(coordination.rank, planned.value, decided["disputed"])
    return coordination.meet("disagreement on the plan", disputed, job.decide_dispute, plans.combine)


def _commit(job: Job, own: WritePlan, written: Outcome[writer.Written], place: writer.Place) -> int:
    """The second meeting, and the one that it may call for; returns the bytes that all ranks wrote."""
    coordination = job.coordination
    combine = partial(writer.combine, place, coordination.leads)
    decided = coordination.meet("commit", written.brought, job.decide_written, combine)
    if decided["differing"]:
        named = write_plan.differing(coordination.rank, own, decided["differing"])
        coordination.meet("comparison of copies", named, job.decide_replicas, replicas.combine)
    coordination.end()
    return decided["bytes"]
