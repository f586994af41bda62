# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of loads in which they read for each other."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.io.ranges import OpenFiles
from mbridge_fsdp_ckpt.live.planned import plan_model
from mbridge_fsdp_ckpt.live.readers.choice import reader_for
from mbridge_fsdp_ckpt.live.readers.megatron_fsdp import find_fsdp_module
from mbridge_fsdp_ckpt.live.replicas import ranks_with_copies
from mbridge_fsdp_ckpt.live.tensors import local_shard
from mbridge_fsdp_ckpt.loading import exchange, sharing
from mbridge_fsdp_ckpt.opening import open_checkpoint
from testing.models import Recipe, Trainable
from tests.core import cases, failures, oracle
from tests.patched import patched

Sharing = Literal["always", "never"]
Trouble = Callable[[Callable[..., Any]], Callable[..., Any]]


def bytes_on_disk(directory: str | Path) -> tuple[int, int]:
    """Bytes of payload: of weights, and of all."""
    source = open_checkpoint(Path(directory))
    chunks = [chunk for found in source.chunks(sorted(source.metadata.keys)).values() for chunk in found]
    weights = sum(chunk.record.length for chunk in chunks if chunk.key.startswith("model."))
    return weights, sum(chunk.record.length for chunk in chunks)


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many bytes of payload this rank reads, a call."""
    read: list[int] = []

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def reading(files: Any, path: Any, offset: int, length: int, *arguments: Any) -> Any:
            if path.name.endswith(".distcp"):
                read.append(length)
            return original(files, path, offset, length, *arguments)

        return reading

    with (
        patch.object(OpenFiles, "read", counting(OpenFiles.read)),
        patch.object(OpenFiles, "read_part", counting(OpenFiles.read_part)),
    ):
        yield read


def own_state(trainable: Trainable) -> list[Any]:
    """Digests of this rank's own blocks, copies and empty ones included."""
    module = trainable.model.module
    tensors = [local_shard(tensor) for tensor in module.state_dict(keep_vars=True).values() if torch.is_tensor(tensor)]
    inner = trainable.optimizer.optimizer
    for parameter in (parameter for group in inner.param_groups for parameter in group["params"]):
        slots = sorted(inner.state.get(parameter, {}).items())
        tensors += [local_shard(value) for _, value in slots if torch.is_tensor(value)]
    return [oracle.digest(tensor) for tensor in tensors]


def load_both_ways(directory: str, recipe: Recipe, at_once: int) -> dict[str, Any]:
    """A save, then loads without and with sharing, each into what further steps made of the model."""
    trainable = cases.prepared(recipe, steps=2)
    mbridge_fsdp_ckpt.save(directory, model=trainable.model, optimizer=trainable.optimizer)
    return {"saved": own_state(trainable), "holds": holds(trainable), **loads(directory, trainable, at_once)}


def holds(trainable: Trainable) -> tuple[set[tuple[Any, ...]], set[tuple[Any, ...]], list[int]]:
    """This rank's blocks, those of them that it does not write, and ranks that are said to hold copies of those."""
    module = find_fsdp_module(trainable.model)
    plans = [item.plan for item in plan_model(module)]
    slices = {(plan.model_key(p.component), p.box.offset, p.box.size): p.writes for plan in plans for p in plan.slices}
    unwritten = {block for block, writes in slices.items() if not writes}
    return set(slices), unwritten, ranks_with_copies(reader_for(module).peers, plans, dist.get_rank())


def load_of_another_layout(directory: str, recipe: Recipe, at_once: int, largest: int = 64) -> dict[str, Any]:
    """Loads without and with sharing of what was saved in another layout."""
    with patch.object(sharing, "LARGEST_GROUP", largest):
        return loads(directory, cases.prepared(recipe, steps=1), at_once)


def loads(directory: str, trainable: Trainable, at_once: int) -> dict[str, Any]:
    """This rank's state after each, and the bytes that it has read."""
    found: dict[str, Any] = {}
    modes: list[tuple[Sharing, Any, int | None]] = [
        ("never", "header", None),
        ("always", "header", None),
        ("always", "full", None),
        ("always", "full", 0),
    ]
    for number, (shared, verify, buffer) in enumerate(modes):
        trainable.step(10 + number)
        settings = mbridge_fsdp_ckpt.Settings(share_reads=shared, verify=verify, read_buffer=buffer)
        with counted() as read, patch.object(exchange, "_AT_ONCE", at_once):
            mbridge_fsdp_ckpt.load(directory, model=trainable.model, optimizer=trainable.optimizer, settings=settings)
        found[f"{shared}, {verify}" + ("" if buffer is None else ", nothing kept")] = own_state(trainable), sum(read)
    return found


def load_with_trouble(directory: str, recipe: Recipe, call: str, trouble: Trouble | None) -> dict[str, Any]:
    """A load in which rank 1 has trouble of some kind: what each rank raised, and whether anything live changed."""
    trainable = cases.prepared(recipe, steps=1, seed=7)
    settings = mbridge_fsdp_ckpt.Settings(share_reads="always", time_limit=30.0)
    in_trouble = trouble is not None and dist.get_rank() == 1
    with patched(call, trouble) if in_trouble and trouble is not None else nullcontext():
        return failures.seen(
            trainable,
            lambda: mbridge_fsdp_ckpt.load(
                directory, model=trainable.model, optimizer=trainable.optimizer, settings=settings
            ),
        )


def broken_disk(read: Callable[..., Any]) -> Callable[..., Any]:
    """In place of a read."""

    def failing(*arguments: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    return failing


def flipped_on_the_way(pack: Callable[..., Any]) -> Callable[..., Any]:
    """In place of `_ReplicaGroup._pack`: a bit changes after the bytes were hashed."""

    def packed(group: Any, slot: Any, own: torch.Tensor, elements: Any) -> None:
        pack(group, slot, own, elements)
        own[exchange._HEADER] ^= 1

    return packed


def one_less(chunks: Callable[..., Any]) -> Callable[..., Any]:
    """In place of `in_file_order`: this rank shares all but the first chunk."""
    return lambda *arguments: chunks(*arguments)[1:]
