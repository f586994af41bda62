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

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from mbridge_fsdp_ckpt.agree import sketches
from mbridge_fsdp_ckpt.agree.agreement import Agreement, next_agreement
from mbridge_fsdp_ckpt.agree.outcome import Outcome
from mbridge_fsdp_ckpt.agree.wire import nothing
from mbridge_fsdp_ckpt.errors import CheckpointError, LoadInterruptedError
from mbridge_fsdp_ckpt.live.holdings import KeyFilter
from mbridge_fsdp_ckpt.loading import asking, exchange, fill, opened
from mbridge_fsdp_ckpt.loading.budget import read_budget
from mbridge_fsdp_ckpt.loading.opened import Opened, Wanted
from mbridge_fsdp_ckpt.loading.sharing import reads_are_shared
from mbridge_fsdp_ckpt.saving import replicas, snapshot, writer
from mbridge_fsdp_ckpt.saving.commit import Job
from mbridge_fsdp_ckpt.settings import Settings
from mbridge_fsdp_ckpt.storage.commit.retention import reading
from mbridge_fsdp_ckpt.storage.source import RankRecord
from mbridge_fsdp_ckpt.storage.store import AnyPath, as_path

__all__ = ["Loaded", "Settings", "load", "load_weights_only", "save"]

Accept = Callable[["Loaded"], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load returns besides filling model and optimizer.

    Args:
        values: The non-tensor state that `save` was given.
        topology: The saving job's sizes.
        own: The saving rank's record with this rank's coordinates, if there is one.
        nearest: The record of one saving rank that shares this rank's (pipeline, tensor) place, if there is one: `own`,
            where there is that.
        skipped: Keys that were allowed to be missing, or to stay unread; of what other ranks found, the first 20.
    """

    values: Mapping[str, Any]
    topology: Mapping[str, int | str]
    own: RankRecord | None
    nearest: RankRecord | None
    skipped: tuple[str, ...] = field(default=())


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
) -> None:
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

    Raises:
        CheckpointError: The same on every rank.  Nothing was committed, the previous checkpoint stands; unless the
            error says that the checkpoint is in its place, because `after_commit` failed.
    """
    settings = settings or Settings()
    agreement = next_agreement(f"save to {_place(directory)}", settings.time_limit, settings.storage_limit)
    job = Job(as_path(directory), settings, agreement, values or {}, add_files, after_commit)

    prepare = partial(snapshot.plan_save, model, optimizer, include, rank_values, settings.vocabulary_size)
    prepared = Outcome.of(prepare, agreement.rank, "planning the save")
    try:
        announced = prepared.message(snapshot.announce)
        judged = agreement.meet("agreement on the plan", announced, job.judge_plans, snapshot.combine)
        place = judged["place"]
        if place is None:
            disputed = snapshot.disputed(agreement.rank, prepared.value, judged["disputed"])
            place = agreement.meet("disagreement on the plan", disputed, job.judge_dispute, sketches.combine)
        with agreement.at_work():
            write = partial(writer.write, prepared.value, place, agreement, settings.replicas)
            written = Outcome.of(write, agreement.rank, "writing chunks")
        try:
            combine = partial(writer.combine, place, agreement.leads)
            differing = agreement.meet("commit", written.brought, job.judge_written, combine)
            if differing:
                named = snapshot.differing(agreement.rank, prepared.value, differing)
                agreement.meet("comparison of copies", named, job.judge_replicas, replicas.combine)
            agreement.end()
        except CheckpointError:
            writer.take_back(place, agreement)
            raise
    finally:
        job.clean_up()


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
    source = as_path(directory)
    shared = reads_are_shared(settings, source)
    purpose = f"{'load' if wanted.with_state else 'load of weights'} from {_place(directory)}"
    purpose += ", reads shared" if shared else ""
    agreement = next_agreement(purpose, settings.time_limit, settings.storage_limit)

    def prepare() -> _Prepared:
        found = opened.open_and_match(source, wanted, settings, agreement)
        values, topology = found.source.head.values, opened.topology_of(found.source)
        loaded = Loaded(values, topology, *opened.records_of(found), skipped=tuple(found.skipped))
        put_in_place = accept(loaded) if accept is not None else _nothing
        return _Prepared(fill.prepare(found, agreement, shared=shared), loaded, put_in_place)

    with ExitStack() as stack:
        with agreement.at_work():
            agreement.on_beat = stack.enter_context(reading(source, enabled=agreement.rank == 0))
            prepared = Outcome.of(prepare, agreement.rank, "reading the checkpoint")
        if shared:
            read = prepared.message(lambda own: [own.opened.source.head.identity])
            agreement.meet("agreement on what to read", read, asking.judge_identities, asking.combine_identities)
            stack.callback(prepared.value.staged.exchange.leave)
        stage = partial(fill.stage, budget=read_budget(settings, source), agreement=agreement)
        staged = prepared.then(lambda own: stage(own.staged), agreement.rank, "reading the checkpoint")
        skipped = _agree(prepared, staged, agreement)
        own = prepared.value
        filled = Outcome.of(lambda: _fill(own, agreement), agreement.rank, "filling tensors")
        try:
            lost = exchange.message(filled, lambda lost: lost)
            agreement.meet("completion of the load", lost, exchange.judge, exchange.first)
            agreement.end()
        except CheckpointError as error:
            raise _interrupted(error) from error
    fill.refresh(own.opened.module)
    return replace(own.loaded, skipped=tuple(sorted({*own.loaded.skipped, *skipped})))


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


def _agree(prepared: Outcome[_Prepared], staged: Outcome[None], agreement: Agreement) -> list[str]:
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


def _fill(prepared: _Prepared, agreement: Agreement) -> None:
    fill.fill(prepared.staged, agreement)
    with agreement.at_work():
        fill.finish(prepared.staged)
        prepared.put_in_place()


def _nothing() -> None:
    """What puts in place nothing."""


def _place(directory: str | os.PathLike[str] | AnyPath) -> str:
    """The directory as all ranks call it, before anything is asked of its storage."""
    text = str(directory)
    return text if "://" in text else str(Path(text).absolute())


def _interrupted(error: CheckpointError) -> CheckpointError:
    return LoadInterruptedError(
        expected="all ranks to fill what they had verified",
        found=str(error),
        remedy="Model and optimizer are partly loaded: end this process and load again.",
        rank=error.rank,
        key=error.key,
        host=error.host,
        phase=error.phase,
    )
