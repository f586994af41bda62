# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The steps of a load: ranks open and read, agree, fill what is live, meet again."""

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
from mbridge_fsdp_ckpt.loading.key_check import KeyCheck, SameCheckpoint, UnexpectedKeys
from mbridge_fsdp_ckpt.loading.match import NAMED
from mbridge_fsdp_ckpt.loading.opened import Opened, Wanted
from mbridge_fsdp_ckpt.loading.result import Completion, Filled, LoadResult, interrupted
from mbridge_fsdp_ckpt.loading.sharing import reads_are_shared
from mbridge_fsdp_ckpt.phases import Phases, tell
from mbridge_fsdp_ckpt.settings import Settings

_DOING = "reading the checkpoint"
_log = logging.getLogger(__name__)

Accept = Callable[[LoadResult], Callable[[], None]]
"""See `checkpoint.load`."""


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
    """All that a rank can do of a load before the others agree."""

    staged: fill.Staged
    loaded: LoadResult
    put_in_place: list[Callable[[], None]]
    unknown_slots: list[str]


def _agree(found: Outcome[Opened], staged: Outcome[int], coordination: Coordination) -> list[str]:
    """The first meeting, and those that it calls for; returns the keys that were skipped."""
    decided = coordination.meet(KeyCheck(found, staged))
    own = found.value
    if decided["slots_differ"]:
        again = Outcome.of(lambda: opened.look_again(own), coordination.rank, "reading the index again")
        coordination.meet(Arrival("slots of parameters", again.brought))
    for buckets in decided["disputed"]:
        coordination.meet(UnexpectedKeys(own, buckets))
    return decided["skipped"]


def _fill(prepared: _Prepared, read: int, coordination: Coordination, phases: Phases) -> Filled:
    """Change what is live, and the second meeting; returns what all ranks say of it.

    Raises:
        LoadInterruptedError: Some rank could not.
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
