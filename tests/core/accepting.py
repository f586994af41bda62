# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of a load's checks: what the caller accepts, and how much is verified."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.io.ranges import OpenFiles
from testing.models import Recipe
from tests.core import cases, failures, oracle

RECIPE = Recipe(layers=1)


def load_unacceptable(directory: str, refusing: int) -> dict[str, Any]:
    """A load whose caller finds fault with the values, on one rank."""
    trainable = cases.prepared(RECIPE, steps=1, seed=7)
    placed: list[int] = []

    def accept(loaded: mbridge_fsdp_ckpt.LoadResult) -> Any:
        if dist.get_rank() == refusing:
            raise ValueError(f"no schedule of iteration {loaded.values['iteration']}")
        return lambda: placed.append(1)

    seen = failures.seen(
        trainable,
        lambda: mbridge_fsdp_ckpt.load(directory, model=trainable.model, optimizer=trainable.optimizer, accept=accept),
    )
    return {**seen, "placed": placed}


def load_accepted(directory: str) -> dict[str, Any]:
    """What the caller sees, and when its own state is put in place."""
    trainable = cases.prepared(RECIPE, seed=7)
    before = oracle.live(trainable)
    order: list[Any] = []

    def accept(loaded: mbridge_fsdp_ckpt.LoadResult) -> Any:
        order.append(("accept", loaded.values["iteration"], oracle.live(trainable) == before))
        return lambda: order.append(("in place", oracle.live(trainable) == before))

    mbridge_fsdp_ckpt.load(directory, model=trainable.model, optimizer=trainable.optimizer, accept=accept)
    return {"order": order, "live": oracle.live(trainable)}


def load_overwritten(directory: str) -> dict[str, Any]:
    """A load that reads once; another save of the layout takes the place of what it has opened and checked."""
    other = cases.prepared(RECIPE, steps=3)
    later = Path(directory).with_name("later")
    mbridge_fsdp_ckpt.save(later, model=other.model, optimizer=other.optimizer, values={"iteration": 3})
    trainable = cases.prepared(RECIPE, steps=1, seed=7)

    def accept(loaded: mbridge_fsdp_ckpt.LoadResult) -> Any:
        dist.barrier()
        if dist.get_rank() == 0:
            Path(directory).rename(later.with_name("aside"))
            later.rename(directory)
        dist.barrier()
        return lambda: None

    settings = mbridge_fsdp_ckpt.Settings(verify="header")
    loaded = mbridge_fsdp_ckpt.load(
        directory, model=trainable.model, optimizer=trainable.optimizer, accept=accept, settings=settings
    )
    return {"iteration": loaded.values["iteration"], "live": oracle.live(trainable), "later": oracle.live(other)}


def load_with_another_filter(directory: str) -> dict[str, Any]:
    """A load of which rank 1 leaves everything out, and in which no rank misses that a key stays unread."""
    trainable = cases.prepared(RECIPE, steps=1, seed=7)
    settings = mbridge_fsdp_ckpt.Settings(allow_unexpected=("*",))
    return failures.seen(
        trainable,
        lambda: mbridge_fsdp_ckpt.load(
            directory,
            model=trainable.model,
            optimizer=trainable.optimizer,
            include=lambda key: dist.get_rank() == 0,
            settings=settings,
        ),
    )


def load_verifying(directory: str, verify: Any, buffer: int | None = None) -> dict[str, Any]:
    """A load; how many bytes of payload it read, and what it loaded or raised."""
    trainable = cases.prepared(RECIPE, steps=1, seed=7)
    settings = mbridge_fsdp_ckpt.Settings(verify=verify, read_buffer=buffer)
    read: list[int] = []

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def reading(files: Any, path: Any, offset: int, length: int, *arguments: Any) -> Any:
            read.append(length)
            return original(files, path, offset, length, *arguments)

        return reading

    before = oracle.live(trainable)
    error = ""
    with (
        patch.object(OpenFiles, "read", counted(OpenFiles.read)),
        patch.object(OpenFiles, "pass_through", counted(OpenFiles.pass_through)),
    ):
        try:
            mbridge_fsdp_ckpt.load(directory, model=trainable.model, optimizer=trainable.optimizer, settings=settings)
        except CheckpointError as caught:
            error = str(caught)
    live = oracle.live(trainable)
    return {"error": error, "read": sum(read), "live": live, "unchanged": live == before}
