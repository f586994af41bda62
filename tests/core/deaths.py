# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of ranks that raise, die or stall in the middle of a save or load."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.coordination import meeting
from mbridge_fsdp_ckpt.coordination.incarnation import incarnation
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.live.tensors import local_shard
from testing.models import Recipe
from tests.core import cases, oracle
from tests.patched import patched

RECIPE = Recipe(layers=1)
COPIES = RECIPE.on(strategy="no_shard", tensor=2)
"""All four hold the same norms, and two the same of all else."""
LIMIT_S, GRACE_S = 1.5, 1.0
STORAGE_LIMIT_S = 0.5  # most steps that stall are inside what may touch storage: its limit comes first
STALL_S = 2 * (LIMIT_S + GRACE_S) + 1.0

Ending = Literal["raises", "dies", "stalls"]


def save(directory: str, victim: int, step: str, ending: Ending) -> dict[str, Any]:
    """A save in which the victim does not get through the step."""
    trainable = cases.prepared(RECIPE, steps=1)
    _met_before()
    with _ended(victim, step, ending):
        return _seen(trainable, lambda settings, **what: mbridge_fsdp_ckpt.save(directory, settings=settings, **what))


def load(directory: str, victim: int, step: str, ending: Ending) -> dict[str, Any]:
    """A load in which the victim does not get through the step."""
    trainable = cases.prepared(RECIPE, steps=1, seed=7)
    _met_before()
    with _ended(victim, step, ending):
        return _seen(trainable, lambda settings, **what: mbridge_fsdp_ckpt.load(directory, settings=settings, **what))


def load_for_each_other(directory: str, victim: int, step: str, ending: Ending) -> dict[str, Any]:
    """A load in which ranks read for each other, and the victim does not get through the step."""
    trainable = cases.prepared(COPIES, steps=1, seed=7)
    _met_before()
    with _ended(victim, step, ending):
        return _seen(
            trainable,
            lambda settings, **what: mbridge_fsdp_ckpt.load(directory, settings=settings, **what),
            share_reads="always",
        )


def _met_before() -> None:
    """As in a job that has saved before: all know the name of the process group, and begin together."""
    incarnation().name(60.0)
    dist.barrier()


def _seen(trainable: Any, action: Any, **more: Any) -> dict[str, Any]:
    before, begin = _own(trainable), time.monotonic()
    settings = mbridge_fsdp_ckpt.Settings(time_limit=LIMIT_S, storage_limit=STORAGE_LIMIT_S, **more)
    try:
        action(settings, model=trainable.model, optimizer=trainable.optimizer)
    except CheckpointError as error:
        seconds = time.monotonic() - begin
        wire = error.to_wire()
        return {**wire, "text": str(error), "seconds": seconds, "unchanged": _own(trainable) == before}
    raise AssertionError("no error was raised")


def _own(trainable: Any) -> list[Any]:
    """Digests of this rank's own blocks: survivors cannot gather any more."""
    module = trainable.model.module
    tensors = [local_shard(tensor) for tensor in module.state_dict(keep_vars=True).values() if torch.is_tensor(tensor)]
    for state in trainable.optimizer.optimizer.state.values():
        tensors += [local_shard(value) for value in state.values() if torch.is_tensor(value)]
    return [oracle.digest(tensor) for tensor in tensors]


@contextmanager
def _ended(victim: int, step: str, ending: Ending) -> Iterator[None]:
    with patch.object(meeting, "GRACE", GRACE_S):
        if dist.get_rank() != victim:
            yield
            return
        with patched(f"mbridge_fsdp_ckpt.{step}", lambda function: _ending(function, ending)):
            yield


def _ending(function: Callable[..., Any], ending: Ending) -> Callable[..., Any]:
    stalls = iter([STALL_S])  # once: some steps have many calls

    def last(*arguments: Any, **named: Any) -> Any:
        if ending == "raises":
            raise RuntimeError("this rank cannot go on")
        if ending == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(next(stalls, 0.0))
        return function(*arguments, **named)

    return last
