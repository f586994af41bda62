# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the disk matrix: a save on storage that fails, then one on storage that works again.

Of an asynchronous save it is the writer whose storage fails; that is told of it as it starts (`in_writer`).
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt import Settings
from mbridge_fsdp_ckpt.commit import removal
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.saving.background.async_saves import async_saves
from testing.models import Recipe, Trainable
from tests.core import cases, oracle
from tests.patched import patched
from tests.soak import in_writer

RECIPE = Recipe(layers=1)
ToldBy = Literal["next save", "end"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A call that fails or stalls on one rank.

    Args:
        call: Module and function.
        rank: The rank.
        error: The error number; None for a call that only takes long.
        time: At which of the rank's calls, from 1.
        seconds: How long a call takes.
    """

    call: str
    rank: int
    error: int | None = None
    time: int = 1
    seconds: float = 0.0


def save_old(directory: str) -> Any:
    """The checkpoint that must survive."""
    trainable = cases.prepared(RECIPE, steps=1)
    mbridge_fsdp_ckpt.save(directory, model=trainable.model, optimizer=trainable.optimizer)
    return oracle.live(trainable)


def save_on(directory: str, fault: Fault | None, time_limit: float, storage_limit: float) -> dict[str, Any]:
    """A save while the fault holds: what this rank saw, and whether the state stayed as it was."""
    trainable = cases.prepared(RECIPE, steps=2)
    before, begin = oracle.live(trainable), time.monotonic()
    settings = mbridge_fsdp_ckpt.Settings(time_limit=time_limit, storage_limit=storage_limit)
    dist.barrier()
    with holding(fault):
        error = _error_of(lambda: _save(directory, trainable, settings))
        assert removal.wait(60.0)
    seconds = time.monotonic() - begin
    dist.barrier()
    return {"error": error, "seconds": seconds, "unchanged": oracle.live(trainable) == before}


def save_beside_on(
    directory: str, fault: Fault | None, time_limit: float, storage_limit: float, told_by: ToldBy
) -> dict[str, Any]:
    """An asynchronous save while the fault holds, and one more step: what this rank saw, of which call.

    Also whether the state is what that step makes of it where nothing is saved.
    """
    trained, trainable = oracle.live(cases.prepared(RECIPE, steps=3)), cases.prepared(RECIPE, steps=2)
    settings, begin = mbridge_fsdp_ckpt.Settings(time_limit=time_limit, storage_limit=storage_limit), time.monotonic()
    dist.barrier()
    with holding_in_writer(fault):
        _save(directory, trainable, settings, background=True)
        trainable.step(2)
        if told_by == "next save":
            another = str(Path(directory).with_name("never"))
            error = _error_of(lambda: _save(another, trainable, settings, background=True))
        else:
            error = _error_of(mbridge_fsdp_ckpt.finish_saves)
    seconds = time.monotonic() - begin
    dist.barrier()
    return {"error": error, "seconds": seconds, "unchanged": oracle.live(trainable) == trained}


def _save(directory: str, trainable: Trainable, settings: Settings, *, background: bool = False) -> None:
    save = mbridge_fsdp_ckpt.async_save if background else mbridge_fsdp_ckpt.save
    save(directory, model=trainable.model, optimizer=trainable.optimizer, settings=settings)


def _error_of(action: Callable[[], object]) -> dict[str, Any] | None:
    try:
        action()
    except CheckpointError as caught:
        return {"name": type(caught).__name__, "text": str(caught), "rank": caught.rank, "host": caught.host}
    return None


def load_then_save(directory: str, again: str) -> Any:
    """What a resume finds; then a save, on storage that works."""
    trainable = cases.prepared(RECIPE, seed=999)
    mbridge_fsdp_ckpt.load(directory, model=trainable.model, optimizer=trainable.optimizer)
    found = oracle.live(trainable)
    mbridge_fsdp_ckpt.save(again, model=trainable.model, optimizer=trainable.optimizer)
    return found


@contextmanager
def holding(fault: Fault | None) -> Iterator[None]:
    if fault is None or fault.rank != dist.get_rank():
        yield
        return
    with patched(fault.call, lambda function: _faulty(function, fault)):
        yield


@contextmanager
def holding_in_writer(fault: Fault | None) -> Iterator[None]:
    """The writer that is started meanwhile has the fault; it ends with the block."""
    async_saves().stop()
    with ExitStack() as stack:
        if fault is not None and fault.rank == dist.get_rank():
            stack.enter_context(in_writer.told(make_faulty, *astuple(fault)))
        yield
    async_saves().stop()


def make_faulty(*told: Any) -> None:
    """In a writer, before it does anything: while it saves, the fault holds."""
    fault = Fault(*told)

    def faulty(save: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with patched(fault.call, lambda function: _faulty(function, fault)):
                return save(*args)

        return call

    patched("mbridge_fsdp_ckpt.saving.background.checkpoint_main:Writer._save", faulty).start()


def _faulty(function: Callable[..., Any], fault: Fault) -> Callable[..., Any]:
    calls = itertools.count(1)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        number = next(calls)
        if fault.error is not None and number == fault.time:
            raise OSError(fault.error, os.strerror(fault.error))
        time.sleep(fault.seconds)
        return function(*args, **kwargs)

    return faulty
