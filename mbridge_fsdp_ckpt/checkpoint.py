"""save() and load(): the whole story.

    save    plan -> agree -> write own chunks to staging -> rank 0 checks, writes the head, commits
    load    open -> match keys -> verify every byte, fill new optimizer slots -> agree -> fill weights -> refresh

Both meet all ranks twice, in the rendezvous store; a load in which ranks read for each other (`loading.exchange`) does
once more, before they begin to.  A save issues no collective; a load only those exchanges, and those with which
Megatron-FSDP gathers compute weights after an optimizer step, at its very end.  An error on one rank is raised on
all.  Until the second meeting of a save the previous checkpoint is untouched; until the first meeting of a load has
passed, so are model and optimizer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mbridge_fsdp_ckpt.agree.agreement import Agreement, next_agreement
from mbridge_fsdp_ckpt.agree.outcome import Outcome
from mbridge_fsdp_ckpt.agree.wire import nothing
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.live.holdings import KeyFilter
from mbridge_fsdp_ckpt.loading import asking, exchange, fill, loaded, opened
from mbridge_fsdp_ckpt.loading.budget import read_budget
from mbridge_fsdp_ckpt.loading.loaded import Loaded
from mbridge_fsdp_ckpt.loading.opened import Opened, Wanted
from mbridge_fsdp_ckpt.loading.sharing import reads_are_shared
from mbridge_fsdp_ckpt.phases import Phases, Spent, line
from mbridge_fsdp_ckpt.saving import snapshot
from mbridge_fsdp_ckpt.saving.commit import Job
from mbridge_fsdp_ckpt.saving.run import run
from mbridge_fsdp_ckpt.saving.saved import Saved
from mbridge_fsdp_ckpt.saving.writer import Watching
from mbridge_fsdp_ckpt.settings import Settings
from mbridge_fsdp_ckpt.storage.bar import job_bar
from mbridge_fsdp_ckpt.storage.commit.retention import reading
from mbridge_fsdp_ckpt.storage.store import AnyPath, as_path, called

__all__ = ["Loaded", "Saved", "Settings", "load", "load_weights_only", "save"]

_log = logging.getLogger(__name__)

Accept = Callable[[Loaded], Callable[[], None]]


def save(
    directory: str | os.PathLike[str] | AnyPath,
    *,
    model: Any,
    optimizer: Any = None,
    values: Mapping[str, Any] | None = None,
    rank_values: Mapping[str, Any] | None = None,
    include: KeyFilter | None = None,
    add_files: Callable[[Path], None] | None = None,
    after_commit: Callable[[], None] | None = None,
    settings: Settings | None = None,
) -> Saved:
    """Save a model and its optimizer to `directory`.  All ranks call it with the same arguments.

    Args:
        directory: The iteration directory, a path or a URL that fsspec knows; replaced as a whole where it exists.
        model: A model wrapped in Megatron-FSDP, or the `MegatronFSDP` module itself.
        optimizer: Megatron's optimizer over it, or a torch optimizer; None saves no optimizer state.
        values: Non-tensor state, the same on all ranks; rank 0's is written.
        rank_values: State of this rank alone, such as RNG states.
        include: Which model keys to save (adapters only, say); all by default.
        add_files: Called on rank 0 with the staging directory, to put more files into the same commit.
        after_commit: Called on rank 0 once the checkpoint is in its place, while the others still wait: to let a
            tracker name it.  Where it raises, all ranks raise.
        settings: See `Settings`.

    Returns:
        What it cost.

    Raises:
        CheckpointError: The same on every rank.  Nothing was committed, the previous checkpoint stands; unless the
            error says that the checkpoint is in its place, because `after_commit` failed.
    """
    settings, phases = settings or Settings(), Phases()
    agreement = next_agreement(f"save to {called(directory)}", settings.time_limit, settings.storage_limit)
    job = Job(as_path(directory), settings, agreement, values or {}, add_files, after_commit)

    prepare = partial(snapshot.plan_save, model, optimizer, include, rank_values, settings.vocabulary_size)
    with phases("plan"):
        prepared = Outcome.of(prepare, agreement.rank, "planning the save")
    outgoing = prepared.then(lambda own: own.outgoing, agreement.rank, "planning the save")
    with job_bar(agreement.rank, wanted=settings.progress) as progress:
        saved = run(job, outgoing, lambda: prepared.value.elements, Watching(phases, progress))
    _say("save", directory, saved, agreement)
    return saved


def load(
    directory: str | os.PathLike[str] | AnyPath,
    *,
    model: Any,
    optimizer: Any = None,
    include: KeyFilter | None = None,
    accept: Accept | None = None,
    settings: Settings | None = None,
) -> Loaded:
    """Load a model and its optimizer from `directory`.  All ranks call it with the same arguments.

    Args:
        directory: An iteration directory of this format, or of stock `fsdp_dtensor`, saved in any layout.
        model: The model to fill, wrapped in Megatron-FSDP.
        optimizer: Its optimizer.  None loads weights only.  Host copies of weights that an optimizer keeps are
            refreshed only if it is given; see `load_weights_only`.
        include: Which model keys to load.
        accept: Called on every rank with what was read, before anything changes.  It checks the values and returns
            what puts them in place, which is called once the tensors are filled.  Where it raises, all ranks fail.
        settings: See `Settings`.

    Raises:
        LoadInterruptedError: Reading failed after live tensors had begun to change: don't go on with them.
        CheckpointError: Any other; the same on every rank, and nothing was changed.
    """
    return _load(directory, Wanted(model, optimizer, include, with_state=True), accept, settings or Settings())


def load_weights_only(
    directory: str | os.PathLike[str] | AnyPath,
    *,
    model: Any,
    optimizer: Any = None,
    include: KeyFilter | None = None,
    accept: Accept | None = None,
    settings: Settings | None = None,
) -> Loaded:
    """Like `load`, but the optimizer keeps its state and only refreshes its copies of the weights.

    An optimizer may keep fp32 weights of its own, on the host or on the device.  Left as they were, they would put the
    old weights back in its first step.

    Args:
        directory: As in `load`.
        model: As in `load`.
        optimizer: The one whose copies to refresh; None where there is none yet.
        include: As in `load`.
        accept: As in `load`.
        settings: As in `load`.

    Raises:
        CheckpointError: As in `load`.
    """
    return _load(directory, Wanted(model, optimizer, include, with_state=False), accept, settings or Settings())


def _load(
    directory: str | os.PathLike[str] | AnyPath, wanted: Wanted, accept: Accept | None, settings: Settings
) -> Loaded:
    source, phases = as_path(directory), Phases()
    shared = reads_are_shared(settings, source)
    purpose = f"{'load' if wanted.with_state else 'load of weights'} from {called(directory)}"
    purpose += ", reads shared" if shared else ""
    agreement = next_agreement(purpose, settings.time_limit, settings.storage_limit)

    def prepare() -> _Prepared:
        found = opened.open_and_match(source, wanted, settings, agreement)
        values, topology = found.source.head.values, opened.topology_of(found.source)
        read = Loaded(values, topology, *opened.records_of(found), skipped=tuple(found.skipped))
        put_in_place = accept(read) if accept is not None else _nothing
        staged = fill.prepare(found, agreement, shared=shared, phases=phases, progress=progress)
        return _Prepared(staged, read, put_in_place)

    with ExitStack() as stack:
        progress = stack.enter_context(job_bar(agreement.rank, wanted=settings.progress))
        with phases("open"), agreement.at_work():
            agreement.on_beat = stack.enter_context(reading(source, enabled=agreement.rank == 0))
            prepared = Outcome.of(prepare, agreement.rank, "reading the checkpoint")
        if shared:
            with phases("agree"):
                read = prepared.message(lambda own: [own.opened.source.head.identity])
                agreement.meet("agreement on what to read", read, asking.judge_identities, asking.combine_identities)
            stack.callback(prepared.value.staged.exchange.leave)
        stage = partial(fill.stage, budget=read_budget(settings), agreement=agreement)
        staged = prepared.then(lambda own: stage(own.staged), agreement.rank, "reading the checkpoint")
        with phases("agree"):
            skipped = _agree(prepared, staged, agreement)
        total = _fill(prepared.value, staged.value, agreement, phases)
    own = prepared.value
    with phases("refresh"):
        fill.refresh(own.opened.module)
    done = replace(own.loaded, skipped=tuple(sorted({*own.loaded.skipped, *skipped})))
    done = replace(done, bytes=staged.value, bytes_of_all=total, seconds=phases.seconds, duration=phases.elapsed)
    _say("load", directory, done, agreement)
    return done


@dataclass(frozen=True, slots=True)
class _Prepared:
    """All that a rank can do of a load before the others agree."""

    staged: fill.Staged
    loaded: Loaded
    put_in_place: Callable[[], None]

    @property
    def opened(self) -> Opened:
        """The checkpoint."""
        return self.staged.opened


def _agree(prepared: Outcome[_Prepared], staged: Outcome[int], agreement: Agreement) -> list[str]:
    """The first meeting, and those that it calls for; returns the keys that were skipped."""
    asked = exchange.message(staged, lambda lost: asking.announce(prepared.value.opened, lost))
    judged = agreement.meet(
        "verification", asked, lambda whole: asking.judge(prepared.value.opened, whole), asking.combine
    )
    found = prepared.value.opened
    if judged["slots_differ"]:
        found_again = Outcome.of(lambda: opened.look_again(found), agreement.rank, "reading the index again")
        agreement.meet("slots of parameters", found_again.brought, nothing, nothing)
    for buckets in judged["disputed"]:
        named = asking.by_name(found, buckets)
        agreement.meet("unexpected keys", named, asking.judge_named, asking.combine_named)
    return judged["skipped"]


def _fill(prepared: _Prepared, read: int, agreement: Agreement, phases: Phases) -> int:
    """Change what is live, and the second meeting; returns the bytes that all ranks have read.

    Raises:
        LoadInterruptedError: Some rank could not.
    """

    def action() -> None:
        fill.fill(prepared.staged, agreement)
        with phases("fill"), agreement.at_work():
            fill.finish(prepared.staged)
            prepared.put_in_place()

    filled = Outcome.of(action, agreement.rank, "filling tensors")
    message = exchange.message(filled, lambda lost: loaded.Filled(lost=lost, bytes=read))
    try:
        with phases("agree"):
            total = agreement.meet("completion of the load", message, loaded.judge, loaded.combine)
            agreement.end()
    except CheckpointError as error:
        raise loaded.interrupted(error) from error
    return total


def _say(what: str, directory: str | os.PathLike[str] | AnyPath, spent: Spent, agreement: Agreement) -> None:
    """Rank 0's one line about a save or load."""
    if agreement.rank == 0:
        _log.info("%s", line(what, called(directory), spent))


def _nothing() -> None:
    """What puts in place nothing."""
