# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Cases that must fail: each returns what a rank saw of the error, and whether anything live changed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.live.tensors import local_shard
from testing.models import Recipe, Trainable
from tests.core import cases, oracle

SMALL = Recipe(layers=1)


def seen(trainable: Trainable, action: Callable[[], Any]) -> dict[str, Any]:
    """The error that the action raised on this rank, as text, and whether the live state stayed as it was."""
    before, start = oracle.live(trainable), time.monotonic()
    try:
        action()
    except CheckpointError as error:
        return {
            "error": type(error).__name__,
            "text": str(error),
            "seconds": time.monotonic() - start,
            "unchanged": oracle.live(trainable) == before,
        }
    raise AssertionError("no error was raised")


def _save(directory: str, trainable: Trainable, time_limit: float = 30.0) -> None:
    settings = mbridge_fsdp_ckpt.Settings(time_limit=time_limit)
    mbridge_fsdp_ckpt.save(directory, model=trainable.model, optimizer=trainable.optimizer, settings=settings)


def save_over(targets: list[str], working: str | None = None) -> dict[str, dict[str, Any]]:
    """Saves to what must not be replaced, of either kind; then one to a free place, to see that all still meet.

    Args:
        targets: Each is to be refused.
        working: Where the job goes after its first save, if it goes anywhere: its writers run by then.
    """
    trainable, found = cases.prepared(SMALL, steps=1), {}
    free = Path(targets[0]).parent / "free"
    options: dict[str, Any] = {"model": trainable.model, "optimizer": trainable.optimizer}
    mbridge_fsdp_ckpt.async_save(free, **options)
    mbridge_fsdp_ckpt.finish_saves()
    before = os.getcwd()  # noqa: PTH109
    try:
        os.chdir(working or before)
        for target in targets:
            for background in (False, True):

                def action(target: str = target, background: bool = background) -> None:
                    (mbridge_fsdp_ckpt.async_save if background else mbridge_fsdp_ckpt.save)(target, **options)
                    mbridge_fsdp_ckpt.finish_saves()

                found[f"{target} {background}"] = seen(trainable, action)
    finally:
        os.chdir(before)
    mbridge_fsdp_ckpt.save(free, **options)
    return found


def save_with_changed_slice(directory: str, shift: int, grow: int) -> dict[str, Any]:
    """A good save, then one whose last rank lies about the place or the size of a shard."""
    trainable = cases.prepared(SMALL, steps=1)
    _save(directory, trainable)
    key, parameter = _cut_between_ranks(trainable)
    if dist.get_rank() == dist.get_world_size() - 1:
        own = parameter.megatron_fsdp_slice
        parameter.megatron_fsdp_slice = slice(own.start - shift, own.stop - shift + grow)
    return {**seen(trainable, lambda: _save(directory, trainable)), "key": key}


def _cut_between_ranks(trainable: Trainable) -> tuple[str, Any]:
    """A matrix of which every rank holds some rows."""
    for key, parameter in trainable.model.module.state_dict(keep_vars=True).items():
        if not isinstance(parameter, torch.nn.Parameter) or parameter.dim() != 2:
            continue
        sizes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sizes, local_shard(parameter).numel())
        if all(sizes):
            return key, parameter
    raise AssertionError("no parameter is cut between ranks")


def save_without_rank_1(directory: str) -> dict[str, Any]:
    """A good save, then one that rank 1 never calls."""
    trainable = cases.prepared(SMALL, steps=1)
    _save(f"{directory}.first", trainable)
    if dist.get_rank() == 1:
        dist.barrier()
        return {}
    before = time.monotonic()
    try:
        _save(directory, trainable, time_limit=2.0)
    except CheckpointError as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - before}
    finally:
        dist.barrier()
    raise AssertionError("no error was raised")


def save_where_rank_1_cannot_write(directory: str) -> dict[str, Any]:
    """Rank 1's disk is full."""
    from unittest.mock import patch

    from mbridge_fsdp_ckpt.format.payload import PayloadWriter

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    trainable = cases.prepared(SMALL, steps=1)
    _save(directory, trainable)
    broken = patch.object(PayloadWriter, "add_pieces", full if dist.get_rank() == 1 else PayloadWriter.add_pieces)
    with broken:
        return seen(trainable, lambda: _save(directory, trainable))


def load_into(directory: str, recipe: Recipe) -> dict[str, Any]:
    """Load a checkpoint that does not fit, or is damaged, after a step."""
    trainable = cases.prepared(recipe, steps=1, seed=7)
    return seen(
        trainable,
        lambda: mbridge_fsdp_ckpt.load(directory, model=trainable.model, optimizer=trainable.optimizer),
    )


def save_of_the_stock_hang(directory: str) -> dict[str, Any]:
    """torch Adam where some shards are empty: ranks hold different numbers of states, and stock never returns."""
    trainable = cases.prepared(Recipe(), steps=1)
    states = len(trainable.optimizer.optimizer.state)
    _save(directory, trainable)
    return {"states": states, "live": oracle.live(trainable), "files": cases.names_in(Path(directory).parent)}


def step_after_memory_was_replaced() -> dict[str, Any]:
    """A step of HybridDeviceOptimizer after a shard on the device got other memory, as `param_offload` gives it."""
    trainable = cases.prepared(SMALL.on(offload=0.5), steps=1)
    hybrid = trainable.optimizer.optimizer
    on_device = [p for p in hybrid.param_to_inner_param if p not in hybrid.gpu_params_map_cpu_copy]
    parameter = next(p for p in on_device if local_shard(p).numel())
    parameter._local_tensor = parameter._local_tensor.clone()
    return seen(trainable, lambda: trainable.step(1))
