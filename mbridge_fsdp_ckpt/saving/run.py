"""The steps of a save once it is planned: ranks agree, each writes, all meet, rank 0 commits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mbridge_fsdp_ckpt.coordination.coordination import Agreement
from mbridge_fsdp_ckpt.coordination.messages import nothing
from mbridge_fsdp_ckpt.coordination.outcome import Outcome
from mbridge_fsdp_ckpt.coverage import plans, replicas
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.saving import write_plan, writer
from mbridge_fsdp_ckpt.saving.commit import Job
from mbridge_fsdp_ckpt.saving.result import Saved
from mbridge_fsdp_ckpt.saving.write_plan import Elements, Outgoing


def run(job: Job, planned: Outcome[Outgoing], elements: Callable[[], Elements], watching: writer.Watching) -> Saved:
    """Save what was planned.

    Args:
        job: The save.
        planned: What this rank writes, or why it can't.
        elements: Of its blocks; asked for once all ranks have agreed.
        watching: See there.

    Raises:
        CheckpointError: The same on every rank.  See `checkpoint.save`.
    """
    agreement, phases = job.agreement, watching.phases
    try:
        with phases("agree"):
            place = _agree_to_write(job, planned)
        with agreement.at_work():
            own = planned.value
            write = partial(writer.write, own, elements(), place, agreement, job.settings.replicas, watching)
            written = Outcome.of(write, agreement.rank, "writing chunks")
        try:
            with phases("commit"):
                total = _commit(job, own, written, place)
        except CheckpointError:
            writer.take_back(place, agreement)
            raise
    finally:
        job.clean_up()
        agreement.close()
    return Saved(written.value["told"]["bytes"], total, phases.seconds, phases.elapsed, phases.elapsed)


def give_up(agreement: Agreement, error: CheckpointError) -> int:
    """Bring an error to the meetings of a save, in the place of a process that cannot go on.

    Returns:
        The bytes that all ranks wrote, if the save was committed all the same.

    Raises:
        CheckpointError: This error, or the one that the ranks have agreed on before.
    """
    try:
        judged: Any = agreement.meet("agreement on the plan", error, nothing, nothing)
        if judged["place"] is None:
            agreement.meet("disagreement on the plan", error, nothing, nothing)
        judged = agreement.meet("commit", error, nothing, nothing)
        if judged["differing"]:
            agreement.meet("comparison of copies", error, nothing, nothing)
        return int(judged["bytes"])
    finally:
        agreement.close()


def _agree_to_write(job: Job, planned: Outcome[Outgoing]) -> writer.Place:
    """The first meeting, and the one that it may call for; returns where to write."""
    agreement = job.agreement
    message = planned.message(write_plan.announce)
    judged = agreement.meet("agreement on the plan", message, job.judge_plans, write_plan.combine)
    if judged["place"] is not None:
        return judged["place"]
    disputed = write_plan.disputed(agreement.rank, planned.value, judged["disputed"])
    return agreement.meet("disagreement on the plan", disputed, job.judge_dispute, plans.combine)


def _commit(job: Job, own: Outgoing, written: Outcome[writer.Written], place: writer.Place) -> int:
    """The second meeting, and the one that it may call for; returns the bytes that all ranks wrote."""
    agreement = job.agreement
    combine = partial(writer.combine, place, agreement.leads)
    judged = agreement.meet("commit", written.brought, job.judge_written, combine)
    if judged["differing"]:
        named = write_plan.differing(agreement.rank, own, judged["differing"])
        agreement.meet("comparison of copies", named, job.judge_replicas, replicas.combine)
    agreement.end()
    return judged["bytes"]
