# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The steps of a load: ranks open and read, agree, fill what is live, meet again."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from mbridge_fsdp_ckpt.commit.retention import reading
from mbridge_fsdp_ckpt.coordination.coordination import Coordination, next_coordination
from mbridge_fsdp_ckpt.coordination.messages import nothing
from mbridge_fsdp_ckpt.coordination.outcome import Outcome
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.io.progress_bar import job_bar
from mbridge_fsdp_ckpt.io.store import AnyPath, as_path, called
from mbridge_fsdp_ckpt.live.optimizer import loss_scales
from mbridge_fsdp_ckpt.loading import exchange, fill, key_check, opened, state
from mbridge_fsdp_ckpt.loading import result as loaded
from mbridge_fsdp_ckpt.loading.budget import read_budget
from mbridge_fsdp_ckpt.loading.key_check import combine_identities, decide_identities
from mbridge_fsdp_ckpt.loading.match import NAMED
from mbridge_fsdp_ckpt.loading.opened import Opened, Wanted
from mbridge_fsdp_ckpt.loading.result import LoadResult
from mbridge_fsdp_ckpt.loading.sharing import reads_are_shared
from mbridge_fsdp_ckpt.phases import Phases, tell
from mbridge_fsdp_ckpt.settings import Settings

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
        values, topology = found.source.metadata.values, opened.topology_of(found.source)
        read = LoadResult(values, topology, *opened.records_of(found), skipped=tuple(found.skipped))
        steps = [accept(read)] if accept is not None else []
        if found.with_state:
            steps.append(loss_scales.restoration(values, wanted.optimizer))
        staged = fill.prepare(found, coordination, shared=shared, phases=phases, progress=progress)
        return _Prepared(staged, read, steps, state.unknown_slots(found, staged.allocated)[:NAMED])

    with ExitStack() as stack:
        progress = stack.enter_context(job_bar(coordination.rank, wanted=settings.progress))
        with phases("open"), coordination.at_work():
            coordination.on_heartbeat = stack.enter_context(reading(source, enabled=coordination.rank == 0))
            prepared = Outcome.of(prepare, coordination.rank, "reading the checkpoint")
        if shared:
            with phases("agree"):
                read = prepared.message(lambda own: [own.opened.source.metadata.identity])
                coordination.meet("comparison of what to read", read, decide_identities, combine_identities)
            stack.callback(prepared.value.staged.exchange.leave)
        stage = partial(fill.stage, budget=read_budget(settings), coordination=coordination)
        staged = prepared.then(lambda own: stage(own.staged), coordination.rank, "reading the checkpoint")
        with phases("agree"):
            skipped = _agree(prepared, staged, coordination)
        filled = _fill(prepared.value, staged.value, coordination, phases)
    if prepared.value.opened.with_weights:
        with phases("refresh"):
            fill.refresh(prepared.value.opened.module)
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

    @property
    def opened(self) -> Opened:
        """The checkpoint."""
        return self.staged.opened


def _agree(prepared: Outcome[_Prepared], staged: Outcome[int], coordination: Coordination) -> list[str]:
    """The first meeting, and those that it calls for; returns the keys that were skipped."""
    asked = exchange.message(staged, lambda lost: key_check.announce(prepared.value.opened, lost))
    decided = coordination.meet(
        "verification", asked, lambda whole: key_check.decide(prepared.value.opened, whole), key_check.combine
    )
    found = prepared.value.opened
    if decided["slots_differ"]:
        found_again = Outcome.of(lambda: opened.look_again(found), coordination.rank, "reading the index again")
        coordination.meet("slots of parameters", found_again.brought, nothing, nothing)
    for buckets in decided["disputed"]:
        named = key_check.by_name(found, buckets)
        coordination.meet("unexpected keys", named, key_check.decide_named, key_check.combine_named)
    return decided["skipped"]


def _fill(prepared: _Prepared, read: int, coordination: Coordination, phases: Phases) -> loaded.Filled:
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
    message = exchange.message(
        filled, lambda lost: loaded.Filled(lost=lost, bytes=read, unknown_slots=prepared.unknown_slots)
    )
    try:
        with phases("agree"):
            whole = coordination.meet("completion of the load", message, loaded.decide, loaded.combine)
            coordination.end()
    except CheckpointError as error:
        raise loaded.interrupted(error) from error
    return whole
