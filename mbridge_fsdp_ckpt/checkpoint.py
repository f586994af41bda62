# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""save(), async_save() and load(): the whole story.

    save    plan -> agree -> write own chunks to staging -> rank 0 checks, writes the metadata, commits
    load    open -> match keys -> verify every byte, fill new optimizer slots -> agree -> fill weights -> refresh

Both meet all ranks twice, in the rendezvous store; a load in which ranks read for each other (`loading.exchange`) does
once more, before they begin to.  A save issues no collective; a load only those exchanges, and those with which
Megatron-FSDP gathers compute weights after an optimizer step, at its very end.  An error on one rank is raised on
all.  Until the second meeting of a save the previous checkpoint is untouched; until the first meeting of a load has
passed, so are model and optimizer.

An asynchronous save takes the same steps in a process of its own (`saving.background`), while training goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mbridge_fsdp_ckpt.coordination.coordination import next_coordination
from mbridge_fsdp_ckpt.coordination.delegated import Participant
from mbridge_fsdp_ckpt.coordination.outcome import Outcome
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.io.progress_bar import job_bar
from mbridge_fsdp_ckpt.io.store import AnyPath, as_path, called
from mbridge_fsdp_ckpt.live.local_shards import KeyFilter
from mbridge_fsdp_ckpt.loading import run as loading
from mbridge_fsdp_ckpt.loading.opened import Wanted
from mbridge_fsdp_ckpt.loading.result import LoadResult
from mbridge_fsdp_ckpt.loading.run import Accept
from mbridge_fsdp_ckpt.phases import Phases, tell
from mbridge_fsdp_ckpt.remedies import Door, entrance
from mbridge_fsdp_ckpt.saving import run as saving
from mbridge_fsdp_ckpt.saving import snapshot
from mbridge_fsdp_ckpt.saving.background.async_saves import async_saves
from mbridge_fsdp_ckpt.saving.background.handle import SaveHandle
from mbridge_fsdp_ckpt.saving.background.order import Order
from mbridge_fsdp_ckpt.saving.commit import Job
from mbridge_fsdp_ckpt.saving.result import SaveResult
from mbridge_fsdp_ckpt.saving.writer import Watching
from mbridge_fsdp_ckpt.settings import Settings

__all__ = [
    "LoadResult",
    "SaveHandle",
    "SaveResult",
    "Settings",
    "async_save",
    "finish_saves",
    "load",
    "load_optimizer",
    "load_weights",
    "release_staging",
    "save",
]

Directory = str | os.PathLike[str] | AnyPath
_DEFAULTS = Settings()


@entrance(Door.PYTHON)
def save(
    directory: Directory,
    *,
    model: Any,
    optimizer: Any = None,
    values: Mapping[str, Any] | None = None,
    rank_values: Mapping[str, Any] | None = None,
    include: KeyFilter | None = None,
    add_files: Callable[[Path], None] | None = None,
    after_commit: Callable[[], None] | None = None,
    settings: Settings | None = None,
) -> SaveResult:
    """Save a model and its optimizer to `directory`, and return once the checkpoint is committed.

    All ranks call it with the same arguments.  An error on one rank is raised on all.

    Args:
        directory: The iteration directory: a path, or a URL that fsspec knows.  A checkpoint that is there is replaced,
            with whatever else lies in its directory.  Anything else is refused before anything is written: a file, a
            link, another format, a root of checkpoints, the working directory and its parents.
        model: A model wrapped in Megatron-FSDP, the `MegatronFSDP` module itself, or a model under torch's FSDP2.
        optimizer: Megatron's optimizer over the model, or a torch optimizer.  None saves no optimizer state.  The loss
            scales of Megatron's fp16 optimizer are saved with it, among the values as "grad_scaler".
        values: Non-tensor state that is the same on all ranks, by name: numbers, strings, bytes, tensors of at most
            1 MiB, dtypes, and lists, tuples and mappings of these.  Rank 0's are written.
        rank_values: State of this rank alone, such as random-number states; of the same types.
        include: Takes a model key, such as "decoder.layers.0.mlp.linear_fc1.weight", and returns whether to save it.
            None saves all.
        add_files: Called on rank 0 with an empty folder.  The files that it puts there are committed with the tensors.
            Links, pipes and the like, and names of the format's own files, fail the save.
        after_commit: Called on rank 0 once the checkpoint is in its place, while the other ranks wait, so that it can
            update a tracker.  If it raises, all ranks raise.
        settings: Time limits, checks and choices of this save.  None takes the defaults of `Settings`.

    Returns:
        Bytes and seconds of this rank, and the bytes of all ranks.

    Raises:
        ConfigurationError: `directory` holds something other than a checkpoint, or the model is not wrapped.
        CheckpointError: Any other.  Nothing was committed and the previous checkpoint stands, unless the error says
            that the checkpoint is in its place because `after_commit` failed.
    """
    settings, phases, place = settings or _DEFAULTS, Phases(), called(directory)
    observe = partial(snapshot.observe, model, optimizer, include, rank_values, values, settings.vocabulary_size)
    with async_saves().old_error_last():
        async_saves().end_last()
        coordination = next_coordination(f"save to {place}", settings.time_limit, settings.storage_limit)
        with phases("plan"):
            prepared = Outcome.of(lambda: snapshot.plan_save(observe()), coordination.rank, "planning the save")
        said = {} if isinstance(prepared.brought, CheckpointError) else prepared.brought.values
        job = Job(as_path(directory), settings, coordination, said, add_files, after_commit)
        write_plan = prepared.then(lambda own: own.read(), coordination.rank, "planning the save")
        with job_bar(coordination.rank, wanted=settings.progress) as progress:
            saved = saving.run(job, write_plan, lambda: prepared.value.elements, Watching(phases, progress))
        if coordination.rank == 0:
            tell("save", place, saved)
        return saved


@entrance(Door.PYTHON)
def async_save(
    directory: Directory,
    *,
    model: Any,
    optimizer: Any = None,
    values: Mapping[str, Any] | None = None,
    rank_values: Mapping[str, Any] | None = None,
    include: KeyFilter | None = None,
    add_files: Callable[[Path], None] | None = None,
    after_commit: Callable[[], None] | None = None,
    settings: Settings | None = None,
) -> SaveHandle:
    """Begin to save, and return while a checkpoint process writes.  All ranks call it with the same arguments.

    The checkpoint has the state as of the call.  Tensors are copied during the next forward and backward pass, and the
    step of any torch optimizer waits until they are.  Where steps may be replays of a captured graph, the call itself
    waits.  Before tensors change otherwise, or are moved or freed, call `SaveHandle.wait_until_taken`.

    Args:
        directory: The iteration directory: a path, or a URL that fsspec knows.  A checkpoint that is there is replaced,
            anything else is refused, as by `save`.
        model: A model wrapped in Megatron-FSDP, or the `MegatronFSDP` module itself.
        optimizer: Megatron's optimizer over the model, or a torch optimizer.  None saves no optimizer state.
        values: Non-tensor state that is the same on all ranks, by name; encoded before the call returns.
        rank_values: State of this rank alone, such as random-number states; encoded before the call returns.
        include: Takes a model key and returns whether to save it.  None saves all.
        add_files: Called on rank 0 with an empty folder, in a thread of this process, while training goes on.  The
            files that it puts there are committed with the tensors.
        after_commit: Called on rank 0 once the checkpoint is in its place, in a thread of this process.  If it raises,
            the save fails on all ranks.
        settings: Time limits, checks and choices of this save.  `Settings.when_busy` says what happens while the save
            before goes on, `Settings.staging_limit` how much host memory the copy may take.

    Returns:
        The save's handle.  It is `SaveHandle.skipped` where `when_busy="skip"` left the save out.

    Raises:
        CheckpointError: The error of the save before, if it has not been raised yet; the new save has ended by
            then.  An error of the new one is raised by `SaveHandle.result`, or by the next save, or by
            `finish_saves`, whichever comes first.  The same on every rank.
    """
    settings, phases, place = settings or _DEFAULTS, Phases(), called(directory)
    observe = partial(snapshot.observe, model, optimizer, include, rank_values, values, settings.vocabulary_size)
    with async_saves().old_error_last():
        participant = Participant.next(f"save to {place}", settings.time_limit, settings.storage_limit)
        if async_saves().skips(participant, settings):
            return SaveHandle.of_skipped(place, participant)
        with phases("wait"):
            async_saves().end_last()
        with phases("plan"):
            observed = Outcome.of(observe, participant.rank, "planning the save")
        order = Order(place, participant, settings, observed, phases, add_files, after_commit)
        return async_saves().begin(order)


def finish_saves() -> None:
    """Wait until no asynchronous save goes on.  All ranks call it, for instance at the end of a run.

    Raises:
        CheckpointError: The last save failed, and its error has not been raised yet.  The same on every rank.
    """
    async_saves().settle()


def release_staging(*, wait: bool = True) -> None:
    """Free the host memory into which asynchronous saves copy, once all of it has been written.

    The next asynchronous save allocates new memory.

    Args:
        wait: Whether to wait for a save that goes on.  If not, the call returns at once, and the memory is freed when
            that save has been written, unless the next one has begun by then, which takes it over.
    """
    async_saves().release(wait=wait)


@entrance(Door.PYTHON)
def load(
    directory: Directory,
    *,
    model: Any,
    optimizer: Any = None,
    include: KeyFilter | None = None,
    accept: Accept | None = None,
    settings: Settings | None = None,
) -> LoadResult:
    """Load a model and its optimizer from `directory`.

    All ranks call it with the same arguments.  Every byte is verified on every rank before anything live changes.

    Args:
        directory: An iteration directory of this format, of stock `fsdp_dtensor` or, for a model under FSDP2, of plain
            DCP, saved in any layout: a path, or a URL that fsspec knows.
        model: The model to fill, wrapped as for `save`.
        optimizer: Megatron's optimizer over the model, or a torch optimizer.  None loads weights only, and leaves the
            copies of weights that an optimizer keeps as they are: `load_weights` refreshes them.
        include: Takes a model key and returns whether to load it, with the optimizer state of that parameter; all
            others stay as they are.  What a param group has for all of its parameters is loaded where one of them is.
            None loads all.
        accept: Called on every rank with what was read, before anything changes.  It checks the values and returns a
            function that puts them in place, which is called once the tensors are filled.  If it raises, all ranks
            raise and nothing changes.
        settings: Time limits, checks and choices of this load.  None takes the defaults of `Settings`.

    Returns:
        The values that were saved, the sizes of the saving job, keys that were skipped, bytes and seconds.

    Raises:
        KeyMismatchError: Keys are missing, unexpected, or of another shape or dtype, and `settings` does not allow it.
        DamagedCheckpointError: A file is missing or truncated, or its bytes are not those that were written.
        LoadInterruptedError: Reading failed after live tensors had begun to change: do not train on.
        CheckpointError: Any other.  The same on every rank, and except for `LoadInterruptedError` nothing was changed.
    """
    return _load(directory, Wanted(model, optimizer, include, weights=True, state=True), accept, settings)


@entrance(Door.PYTHON)
def load_weights(
    directory: Directory,
    *,
    model: Any,
    optimizer: Any = None,
    include: KeyFilter | None = None,
    accept: Accept | None = None,
    settings: Settings | None = None,
) -> LoadResult:
    """Load weights and buffers; the optimizer keeps its state and refreshes its copies of the weights.

    All ranks call it with the same arguments.  An optimizer may keep fp32 weights of its own, on the host or on the
    device; left as they were, they would put the old weights back in its first step.  Slots of an optimizer that this
    package does not know may be such copies, too: they stay as they are, and `LoadResult.unknown_slots` and the log
    name them.

    Args:
        directory: An iteration directory of this format, or of stock `fsdp_dtensor`, saved in any layout.
        model: The model to fill, wrapped in Megatron-FSDP, or the `MegatronFSDP` module itself.
        optimizer: The optimizer whose copies of weights to refresh.  None where there is none yet.
        include: Takes a model key and returns whether to load it.  None loads all.
        accept: Called on every rank with what was read, before anything changes; returns a function that is called once
            the tensors are filled.  If it raises, all ranks raise and nothing changes.
        settings: Time limits, checks and choices of this load.  None takes the defaults of `Settings`.

    Returns:
        What `load` returns.

    Raises:
        LoadInterruptedError: Reading failed after live tensors had begun to change: do not train on.
        CheckpointError: Any other.  The same on every rank, and nothing was changed.
    """
    return _load(directory, Wanted(model, optimizer, include, weights=True, state=False), accept, settings)


@entrance(Door.PYTHON)
def load_optimizer(
    directory: Directory,
    *,
    model: Any,
    optimizer: Any,
    include: KeyFilter | None = None,
    accept: Accept | None = None,
    settings: Settings | None = None,
) -> LoadResult:
    """Load optimizer state; the model keeps its weights and buffers.  All ranks call it with the same arguments.

    Args:
        directory: An iteration directory of this format, or of stock `fsdp_dtensor`, saved in any layout.
        model: The model that the optimizer is over, wrapped in Megatron-FSDP, or the `MegatronFSDP` module itself.
        optimizer: The optimizer to fill.  Copies of weights that the checkpoint lacks are set from the live weights.
        include: Takes the model key of a parameter and returns whether to load its state.  None loads all.
        accept: Called on every rank with what was read, before anything changes; returns a function that is called once
            the state is in place.  If it raises, all ranks raise and nothing changes.
        settings: Time limits, checks and choices of this load.  None takes the defaults of `Settings`.

    Returns:
        What `load` returns.

    Raises:
        LoadInterruptedError: Reading failed after live state had begun to change: do not train on.
        CheckpointError: Any other.  The same on every rank, and nothing was changed.
    """
    return _load(directory, Wanted(model, optimizer, include, weights=False, state=True), accept, settings)


def _load(directory: Directory, wanted: Wanted, accept: Accept | None, settings: Settings | None) -> LoadResult:
    """Load; what an asynchronous save still copies is copied before anything changes."""
    async_saves().wait_until_taken()
    return loading.run(directory, wanted, accept, settings or _DEFAULTS)
