# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do where they hold copies of one tensor: all alike, some missing, some changed, or of no elements."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.live.tensors import local_shard
from mbridge_fsdp_ckpt.plan.slices import owner
from testing.models import Recipe, Trainable
from tests.core import cases

SMALL = Recipe(layers=1)


def gpt_of(trainable: Trainable) -> torch.nn.Module:
    """The model without its wrappers."""
    module = trainable.model
    while isinstance(getattr(module, "module", None), torch.nn.Module):
        module = module.module
    found: torch.nn.Module = module
    return found


def registered(trainable: Trainable, name: str, value: torch.Tensor) -> None:
    """Give the model a persistent buffer after it was wrapped."""
    gpt_of(trainable).register_buffer(name, value)


def writer_of(name: str) -> int:
    """The rank that is to write a buffer that all ranks hold."""
    return owner(f"module.{name}", dist.get_world_size())


@contextmanager
def warnings_of_the_package() -> Iterator[list[str]]:
    """What this rank logs as a warning meanwhile."""
    found: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    listener, log = Listener(logging.WARNING), logging.getLogger("mbridge_fsdp_ckpt")
    log.addHandler(listener)
    try:
        yield found
    finally:
        log.removeHandler(listener)


def attempt(directory: str, trainable: Trainable, **settings: Any) -> dict[str, Any]:
    """A save: the error that this rank saw, if any, and what it logged."""
    with warnings_of_the_package() as logged:
        try:
            mbridge_fsdp_ckpt.save(
                directory,
                model=trainable.model,
                optimizer=trainable.optimizer,
                settings=mbridge_fsdp_ckpt.Settings(**settings),
            )
        except CheckpointError as error:
            return {"error": type(error).__name__, "text": str(error), "logged": logged}
    return {"error": None, "text": "", "logged": logged}


def save_with_a_buffer_on_one_rank(directory: str, *, on_writer: bool) -> dict[str, Any]:
    """One rank alone has a buffer: the one that is to write it, or another."""
    trainable = cases.prepared(SMALL, steps=1)
    if (dist.get_rank() == writer_of("rare")) is on_writer:
        registered(trainable, "rare", torch.arange(6.0))
    return attempt(directory, trainable)


def load_a_buffer_on_one_rank(directory: str) -> list[float] | None:
    """Another run in which the rank that is to write it, and no other, has the buffer."""
    trainable = cases.prepared(SMALL, seed=999)
    if dist.get_rank() == writer_of("rare"):
        registered(trainable, "rare", torch.zeros(6))
    mbridge_fsdp_ckpt.load(directory, model=trainable.model, optimizer=trainable.optimizer)
    buffer = dict(gpt_of(trainable).named_buffers()).get("rare")
    return None if buffer is None else [float(value) for value in buffer]


def save_and_load_without_elements(directory: str) -> dict[str, Any]:
    """Buffers of no elements, beside others."""
    trainable = cases.prepared(SMALL, steps=1)
    for name, shape in (("nothing", (0,)), ("no_rows", (0, 4)), ("no_columns", (3, 0))):
        registered(trainable, name, torch.empty(shape))
    result = attempt(directory, trainable)
    mbridge_fsdp_ckpt.load(directory, model=trainable.model, optimizer=trainable.optimizer)
    return result


def save_with_a_changed_copy(directory: str, recipe: Recipe, changed: str, choice: str) -> dict[str, Any]:
    """A save after two steps, in which the last rank's copies of some tensors were changed."""
    trainable = cases.prepared(recipe, steps=2)
    registered(trainable, "counted", torch.arange(6.0))
    state = trainable.model.module.state_dict(keep_vars=True)
    keys = [key for key in state if changed and key.endswith(changed)]
    if dist.get_rank() == dist.get_world_size() - 1:
        for key in keys:
            local_shard(state[key]).add_(1)
    return {**attempt(directory, trainable, replicas=choice), "keys": keys}
