# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""save(), async_save() and load(): the whole story.

    save    plan -> agree -> write own chunks to staging -> rank 0 checks, writes the metadata, commits
    load    open -> match keys -> verify every byte, fill new optimizer slots -> agree -> fill weights -> refresh

Both meet all ranks twice, in the rendezvous store; a load in which ranks read for each other (`loading.exchange`) does
once more, before they begin to.  A save issues no collective; a load only those exchanges, and those with which
Megatron-FSDP gathers compute weights after an optimizer step, at its very end.  An error on one rank is raised on
all.  Until the second meeting of a save the previous checkpoint is untouched; until the first meeting of a load has
passed, so are model and optimizer.

An asynchronous save takes the same steps in a process of its own (`saving.background`), while training continues.
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
from mbridge_fsdp_ckpt.remedies import Frontend, entry_point
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


@entry_point(Frontend.PYTHON)
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
        directory: The iteration directory: a path, or a URL with a protocol of fsspec, such as "s3://bucket/iter_0000010".
            A checkpoint in it is replaced, with all other files in that directory.  Anything else is refused before
            anything is written: a file, a link, another format, a root of checkpoints, the working directory and its
            parents.
        model: A model wrapped in Megatron-FSDP, the `MegatronFSDP` module itself, or a model under torch's FSDP2.
        optimizer: Megatron's optimizer over the model, or a torch optimizer.  None saves no optimizer state.  The loss
            scales of Megatron's fp16 optimizer are saved with it, among the values as "grad_scaler".
        values: Non-tensor state that is the same on all ranks, by name: numbers, strings, bytes, tensors of at most
            1 MiB, dtypes, and lists, tuples and mappings of these.  The values of rank 0 are written.
        rank_values: State of this rank alone, such as random-number states, of the same types as `values`.
        include: Takes a model key, such as "decoder.layers.0.mlp.linear_fc1.weight", and returns whether to save it.
            None saves all.
        add_files: Called on rank 0 with an empty folder.  The files that it puts there are committed with the tensors.
            The save fails if a file is a link, a pipe or another special file, or has the name of a file of the format.
        after_commit: Called on rank 0 once the checkpoint is in its place, while the other ranks wait, so that it can
            update a tracker.  If it raises, all ranks raise.
        settings: Time limits, checks and choices of this save.  None means the defaults of `Settings`.

    Returns:
        Bytes and seconds of this rank, and the bytes of all ranks.

    Raises:
        ConfigurationError: `directory` holds something other than a checkpoint, or the model is not wrapped.
        CheckpointError: The save failed otherwise.  Nothing was committed and the previous checkpoint stands, unless
            `after_commit` failed: the error says then that the checkpoint is in its place.
    """
    settings, phases, place = settings or _DEFAULTS, Phases(), called(directory)
    observe = partial(snapshot.observe, model, optimizer, include, rank_values, values, settings.vocabulary_size)
    with async_saves().old_error_last():
        async_saves().end_last()
        coordination = next_coordination(f"save to {place}", settings.time_limit, settings.storage_limit)
        with phases("plan"):
            prepared = Outcome.of(lambda: snapshot.plan_save(observe()), coordination.rank, "planning the save")
        with_groups = {} if isinstance(prepared.brought, CheckpointError) else prepared.brought.values
        job = Job(as_path(directory), settings, coordination, with_groups, add_files, after_commit)
        write_plan = prepared.then(lambda own: own.read(), coordination.rank, "planning the save")
        with job_bar(coordination.rank, wanted=settings.progress) as progress:
            saved = saving.run(job, write_plan, lambda: prepared.value.elements, Watching(phases, progress))
        if coordination.rank == 0:
            tell("save", place, saved)
        return saved


@entry_point(Frontend.PYTHON)
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
    step of any torch optimizer waits until they are copied.  If the step may be the replay of a CUDA graph, which
    cannot wait, the call itself waits.  Before tensors change otherwise, or are moved or freed, call
    `SaveHandle.wait_until_taken`.

    Args:
        directory: The iteration directory: a path, or a URL with a protocol of fsspec.  A checkpoint in it is replaced,
            anything else is refused, as by `save`.
        model: A model, wrapped as for `save`.
        optimizer: Megatron's optimizer over the model, or a torch optimizer.  None saves no optimizer state.
        values: Non-tensor state that is the same on all ranks, by name; encoded before the call returns.
        rank_values: State of this rank alone, such as random-number states; encoded before the call returns.
        include: Takes a model key and returns whether to save it.  None saves all.
        add_files: Called on rank 0 with an empty folder, in a thread of this process, while training continues.  The
            files that it puts there are committed with the tensors.
        after_commit: Called on rank 0 once the checkpoint is in its place, in a thread of this process.  If it raises,
            the save fails on all ranks.
        settings: Time limits, checks and choices of this save; None means the defaults of `Settings`.
            `Settings.when_busy` says what happens if the previous save is in progress, `Settings.staging_limit` how
            much host memory the copy may take.

    Returns:
        The handle of the save.  Its `SaveHandle.skipped` is True if `when_busy="skip"` left the save out.

    Raises:
        CheckpointError: The error of the previous save, if it has not been raised yet.  It is raised once the new save
            has ended, too.  An error of the new save is raised by `SaveHandle.result`, the next save, or
            `finish_saves`, whichever is called first.  The same on every rank.
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
    """Wait until no asynchronous save is in progress.  All ranks call it, for instance at the end of a run.

    Raises:
        CheckpointError: The last save failed, and its error has not been raised yet.  The same on every rank.
    """
    async_saves().settle()


def release_staging(*, wait: bool = True) -> None:
    """Free the host memory into which asynchronous saves copy, once all of it has been written.

    The next asynchronous save allocates new memory.

    Args:
        wait: Whether to wait for a save in progress.  If not, the call returns at once, and the memory is freed when
            that save has been written, unless the next save has begun by then and uses the memory.
    """
    async_saves().release(wait=wait)


@entry_point(Frontend.PYTHON)
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
            DCP, saved in any layout: a path, or a URL with a protocol of fsspec.
        model: The model to fill, wrapped as for `save`.
        optimizer: Megatron's optimizer over the model, or a torch optimizer.  None loads weights only.  The copies of
            weights that an optimizer keeps stay as they are then: use `load_weights`, which refreshes them.
        include: Takes a model key and returns whether to load it, with the optimizer state of that parameter; all
            others stay as they are.  Hyperparameters of a param group are loaded if any of its parameters is.  None
            loads all.
        accept: Called on every rank with what was read, before anything changes.  It checks the values and returns a
            function that puts them in place, which is called once the tensors are filled.  If it raises, all ranks
            raise and nothing changes.
        settings: Time limits, checks and choices of this load.  None means the defaults of `Settings`.

    Returns:
        The values that were saved, the sizes of the saving job, keys that were skipped, bytes and seconds.

    Raises:
        KeyMismatchError: Keys are missing or unexpected, or have another shape or dtype, and `settings` does not allow
            it.
        DamagedCheckpointError: A file is missing or truncated, or its bytes were changed.
        LoadInterruptedError: Reading failed after live tensors had begun to change: do not train on.
        CheckpointError: The load failed otherwise.  The same on every rank, and unless it is a `LoadInterruptedError`,
            nothing was changed.
    """
    return _load(directory, Wanted(model, optimizer, include, weights=True, state=True), accept, settings)


@entry_point(Frontend.PYTHON)
def load_weights(
    directory: Directory,
    *,
    model: Any,
    optimizer: Any = None,
    include: KeyFilter | None = None,
    accept: Accept | None = None,
    settings: Settings | None = None,
) -> LoadResult:
    """Load weights and buffers.  The optimizer keeps its state and refreshes its copies of the weights.

    All ranks call it with the same arguments.  An optimizer may keep fp32 copies of the weights, on the host or on the
    device.  If they were not refreshed, its first step would restore the old weights.  Slots that this package does not
    know may be such copies, too: they stay as they are, and `LoadResult.unknown_slots` and the log name them.

    Args:
        directory: An iteration directory of this format, or of stock `fsdp_dtensor`, saved in any layout.
        model: The model to fill, wrapped in Megatron-FSDP, or the `MegatronFSDP` module itself.
        optimizer: The optimizer whose copies of weights to refresh; None if there is none yet.
        include: Takes a model key and returns whether to load it.  None loads all.
        accept: Called on every rank with what was read, before anything changes; returns a function that is called once
            the tensors are filled.  If it raises, all ranks raise and nothing changes.
        settings: Time limits, checks and choices of this load.  None means the defaults of `Settings`.

    Returns:
        What `load` returns.

    Raises:
        LoadInterruptedError: Reading failed after live tensors had begun to change: do not train on.
        CheckpointError: The load failed otherwise.  The same on every rank, and nothing was changed.
    """
    return _load(directory, Wanted(model, optimizer, include, weights=True, state=False), accept, settings)


@entry_point(Frontend.PYTHON)
def load_optimizer(
    directory: Directory,
    *,
    model: Any,
    optimizer: Any,
    include: KeyFilter | None = None,
    accept: Accept | None = None,
    settings: Settings | None = None,
) -> LoadResult:
    """Load optimizer state.  The model keeps its weights and buffers.  All ranks call it with the same arguments.

    Args:
        directory: An iteration directory of this format, or of stock `fsdp_dtensor`, saved in any layout.
        model: The model that the optimizer is over, wrapped in Megatron-FSDP, or the `MegatronFSDP` module itself.
        optimizer: The optimizer to fill.  Copies of weights that the checkpoint lacks are set from the live weights.
        include: Takes the model key of a parameter and returns whether to load its state.  None loads all.
        accept: Called on every rank with what was read, before anything changes; returns a function that is called once
            the state is in place.  If it raises, all ranks raise and nothing changes.
        settings: Time limits, checks and choices of this load.  None means the defaults of `Settings`.

    Returns:
        What `load` returns.

    Raises:
        LoadInterruptedError: Reading failed after live state had begun to change: do not train on.
        CheckpointError: The load failed otherwise.  The same on every rank, and nothing was changed.
    """
    return _load(directory, Wanted(model, optimizer, include, weights=False, state=True), accept, settings)


def _load(directory: Directory, wanted: Wanted, accept: Accept | None, settings: Settings | None) -> LoadResult:
    """Wait until an asynchronous save in progress has copied its tensors, then load."""
    async_saves().wait_until_taken()
    return loading.run(directory, wanted, accept, settings or _DEFAULTS)
