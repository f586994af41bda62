"""What ranks do in the disk matrix: a save on storage that fails, then one on storage that works again."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.storage.commit import removal
from mbridge_fsdp_ckpt.testing.models import Recipe
from tests.core import cases, oracle
from tests.patched import patched

RECIPE = Recipe(layers=1)


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
    error = None
    dist.barrier()
    with holding(fault):
        try:
            mbridge_fsdp_ckpt.save(directory, model=trainable.model, optimizer=trainable.optimizer, settings=settings)
        except CheckpointError as caught:
            error = {"name": type(caught).__name__, "text": str(caught), "rank": caught.rank, "host": caught.host}
        assert removal.wait(60.0)
    seconds = time.monotonic() - begin
    dist.barrier()
    return {"error": error, "seconds": seconds, "unchanged": oracle.live(trainable) == before}


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


def _faulty(function: Callable[..., Any], fault: Fault) -> Callable[..., Any]:
    calls = itertools.count(1)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        number = next(calls)
        if fault.error is not None and number == fault.time:
            raise OSError(fault.error, os.strerror(fault.error))
        time.sleep(fault.seconds)
        return function(*args, **kwargs)

    return faulty
