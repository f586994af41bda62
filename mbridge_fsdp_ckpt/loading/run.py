# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The steps of a load: ranks open and read, agree, fill live tensors, and meet again."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

from mbridge_fsdp_ckpt.commit.retention import reading
from mbridge_fsdp_ckpt.coordination.coordination import Coordination, next_coordination
from mbridge_fsdp_ckpt.coordination.outcome import Outcome
from mbridge_fsdp_ckpt.coordination.rounds import Arrival
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.io.progress_bar import job_bar
from mbridge_fsdp_ckpt.io.store import AnyPath, as_path, called
from mbridge_fsdp_ckpt.live.optimizer import loss_scales
from mbridge_fsdp_ckpt.loading import fill, opened, state
from mbridge_fsdp_ckpt.loading.budget import read_budget
from mbridge_fsdp_ckpt.loading.key_check import DifferingSlots, KeyCheck, SameCheckpoint, UnexpectedKeys
from mbridge_fsdp_ckpt.loading.match import NAMED
from mbridge_fsdp_ckpt.loading.opened import Opened, Wanted
from mbridge_fsdp_ckpt.loading.result import Completion, Filled, LoadResult, interrupted
from mbridge_fsdp_ckpt.loading.sharing import reads_are_shared
from mbridge_fsdp_ckpt.phases import Phases, tell
from mbridge_fsdp_ckpt.settings import Settings

_DOING = "reading the checkpoint"
_log = logging.getLogger(__name__)

Accept = Callable[[LoadResult], Callable[[], None]]
"""Called on every rank with what was read, before anything changes.  It checks the values and returns a function that
puts them in place, which is called once the tensors are filled.  If it raises, all ranks raise and nothing changes."""


def run(
    directory: str | os.PathLike[str] | AnyPath, wanted: Wanted, accept: Accept | None, settings: Settings
) -> LoadResult:
    """Load what is wanted; arguments and errors are those of `checkpoint.load`."""
    source, phases = as_path(directory), Phases()
    shared = reads_are_shared(settings, source)
    purpose = f"{wanted.called} from {called(directory)}{', reads shared' if shared else ''}"
    coordination = next_coordination(purpose, settings.time_limit, settings.storage_limit)

    def prepare() -> _Prepared:
        found = opened.open_and_match(source, wanted, settings, coordination)
        values, topology = opened.values_of(found), opened.topology_of(found.source)
        read = LoadResult(values, topology, *opened.records_of(found), skipped=tuple(found.skipped))
        steps = [accept(read)] if accept is not None else []
        if found.with_state:
            steps.append(loss_scales.restoration(values, wanted.optimizer))
        staged = fill.prepare(found, coordination, shared=shared, phases=phases, progress=progress)
        return _Prepared(staged, read, steps, state.unknown_slots(found, staged.allocated)[:NAMED])

    with closing(coordination), ExitStack() as stack:
        progress = stack.enter_context(job_bar(coordination.rank, wanted=settings.progress))
        with phases("open"), coordination.at_work():
            coordination.on_heartbeat = stack.enter_context(reading(source, enabled=coordination.rank == 0))
            prepared = Outcome.of(prepare, coordination.rank, _DOING)
        found = prepared.then(lambda own: own.staged.opened, coordination.rank, _DOING)
        if shared:
            with phases("agree"):
                coordination.meet(SameCheckpoint(found))
            stack.callback(prepared.value.staged.exchange.leave)
        stage = partial(fill.stage, budget=read_budget(settings), coordination=coordination)
        staged = prepared.then(lambda own: stage(own.staged), coordination.rank, _DOING)
        with phases("agree"):
            skipped = _agree(found, staged, coordination)
        filled = _fill(prepared.value, staged.value, coordination, phases)
    if found.value.with_weights:
        with phases("refresh"):
            found.value.reader.refresh()
    done = prepared.value.loaded.with_results(skipped, filled, staged.value, phases)
    if coordination.rank == 0:
        _tell(directory, done)
    return done


def _tell(directory: str | os.PathLike[str] | AnyPath, done: LoadResult) -> None:
    tell("load", called(directory), done)
    for text in done.warnings():
        _log.warning(text)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What a rank has done of a load before the ranks agree.

    Args:
        staged: The memory to fill.
        loaded: The result of the load so far.
        put_in_place: Functions to call once the tensors are filled.
        unknown_slots: See `LoadResult.unknown_slots`; the first 20.
    """

    staged: fill.Staged
    loaded: LoadResult
    put_in_place: list[Callable[[], None]]
    unknown_slots: list[str]


def _agree(found: Outcome[Opened], staged: Outcome[int], coordination: Coordination) -> list[str]:
    """Hold the first meeting, and the meetings that it calls for.

    Returns:
        The keys that were skipped.

    Raises:
        CheckpointError: The ranks do not agree.  The same on every rank.
    """
    decided = coordination.meet(KeyCheck(found, staged))
    own = found.value
    if decided["slots_differ"]:
        explained = Outcome.of(
            lambda: opened.explain_differing_slots(own), coordination.rank, "reading the index of all ranks"
        )
        coordination.meet(Arrival("slots of parameters", explained.brought))
    for buckets in decided["disputed"]:
        coordination.meet(UnexpectedKeys(own, buckets))
    if decided["slots_differ"]:
        coordination.meet(DifferingSlots())
    return decided["skipped"]


def _fill(prepared: _Prepared, read: int, coordination: Coordination, phases: Phases) -> Filled:
    """Fill live tensors, and hold the second meeting.

    Returns:
        The messages of all ranks to that meeting, combined.

    Raises:
        LoadInterruptedError: A rank failed while it filled.
    """

    def action() -> None:
        fill.fill(prepared.staged, coordination)
        with phases("fill"), coordination.at_work():
            fill.finish(prepared.staged)
            for step in prepared.put_in_place:
                step()

    filled = Outcome.of(action, coordination.rank, "filling tensors")
    try:
        with phases("agree"):
            whole = coordination.meet(Completion(filled, read, prepared.unknown_slots))
            coordination.end()
    except CheckpointError as error:
        raise interrupted(error) from error
    return whole
