# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Where loaded elements go: views of the very memory that the model or the optimizer reads, never copies of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from mbridge_fsdp_ckpt.errors import InternalError, UnsupportedStateError
from mbridge_fsdp_ckpt.io.host_bytes import byte_row
from mbridge_fsdp_ckpt.io.ranges import Place
from mbridge_fsdp_ckpt.live.refusals import refuse_unreadable
from mbridge_fsdp_ckpt.live.tensors import storage_of
from mbridge_fsdp_ckpt.plan.boxes import Box, whole
from mbridge_fsdp_ckpt.plan.slices import Component, ParameterPlan, Slice


@dataclass(frozen=True, slots=True)
class Destination:
    """A block of a key to fill, and its memory.

    Args:
        box: The block, in the global tensor; of no dimensions for a scalar.
        memory: A view of the live tensor, shaped as the block.
    """

    box: Box
    memory: torch.Tensor

    def take(self, box: Box, data: torch.Tensor) -> int:
        """Copy the elements that a chunk has of the block.

        Args:
            box: The chunk, in the global tensor.
            data: The elements of the chunk.

        Returns:
            The number of elements that were copied into live memory.
        """
        common = box.intersect(self.box)
        if common is None:
            return 0
        target = self._at(common)
        target.copy_(data if common is box else data[common.slices_in(box)])
        return target.numel()

    def place_in(self, box: Box, dtype: torch.dtype) -> Place | None:
        """The memory into which a chunk can be read directly; None where its elements must be copied.

        It can if the common elements lie contiguously in the chunk and in host memory of the same dtype.

        Args:
            box: The chunk, in the global tensor.
            dtype: The dtype of the chunk.
        """
        common = box.intersect(self.box)
        if common is None or self.memory.dtype != dtype or self.memory.device.type != "cpu":
            return None
        target, run = self._at(common), common.run_in(box)
        if run is None or not target.is_contiguous():
            return None
        return Place(run.start * dtype.itemsize, byte_row(target).numpy())

    def _at(self, common: Box) -> torch.Tensor:
        """Memory of a part of the block."""
        return self.memory if common == self.box else self.memory[common.slices_in(self.box)]


def scalar(live: torch.Tensor) -> Destination:
    """A 0-d tensor as a destination."""
    return Destination(Box((), ()), live)


def block(slice_: Slice, live: torch.Tensor, key: str) -> Destination:
    """The slice of a live local shard as a destination, whatever the shard's strides.

    Raises:
        UnsupportedStateError: Elements of the shard share memory, or do not lie in memory as they are.
        InternalError: The slice is no view of the shard.
    """
    refuse_unreadable(live, key)
    _refuse_overlap(live, key)
    if live.is_contiguous():
        memory = slice_.block(live.view(-1))
    elif slice_.outer == tuple(live.shape):  # the shard is the whole tensor: a buffer
        memory = live[slice_.inner.slices_in(whole(slice_.outer))]
    else:
        raise _no_view(slice_, live, key)
    if storage_of(memory) != storage_of(live):
        raise _no_view(slice_, live, key)
    return Destination(slice_.box, memory)


Targets = dict[str, list[Destination]]
"""For each key, the destinations to fill."""


def add_targets(
    targets: Targets,
    plan: ParameterPlan,
    key_of: Callable[[Component], str],
    live: torch.Tensor,
    asked: Collection[str],
) -> None:
    """Add the slices of a local shard to the destinations, for the keys that the checkpoint has.

    Args:
        targets: The destinations, to which slices are added.
        plan: The plan of the parameter.
        key_of: Takes a component and returns its key.
        live: The local shard of the weight or of a slot.
        asked: The keys to fill.
    """
    for slice_ in plan.slices:
        key = key_of(slice_.component)
        if key in asked:
            targets[key].append(block(slice_, live, key))


def refuse_copy(buffer: torch.Tensor, held: Collection[int], key: str) -> None:
    """Refuse to fill a tensor of the state dict that the model does not hold.

    Args:
        buffer: The state dict's tensor.
        held: `storage_of` the model's buffers.
        key: The key of the buffer on disk.

    Raises:
        UnsupportedStateError: It was made for the state dict: filling it would change nothing.
    """
    if storage_of(buffer) not in held:
        raise UnsupportedStateError(
            expected="the state dict to have the model's own buffer",
            found="a copy of the buffer, or a tensor that was made from it",
            remedy="Let the module's state dict have what it registers. Nothing was changed.",
            key=key,
        )


def _refuse_overlap(live: torch.Tensor, key: str) -> None:
    """Refuse memory to which one value cannot be written without changing another."""
    if live.is_contiguous():
        return
    reach = 0
    for stride, size in sorted(zip(live.stride(), live.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise UnsupportedStateError(
                expected="a tensor to fill with memory of its own for every element",
                found=f"elements that share memory: shape {list(live.shape)}, strides {list(live.stride())}",
                remedy="Register a buffer that was expanded, or is made of windows, with .contiguous(). "
                "Nothing was changed.",
                key=key,
            )
        reach += stride * (size - 1)


def _no_view(slice_: Slice, live: torch.Tensor, key: str) -> InternalError:
    return InternalError(
        expected=f"{slice_.box} to be a view of this rank's shard",
        found=f"no view in a shard of shape {list(live.shape)} and strides {list(live.stride())}",
        remedy="Report it with the model's parameters. Nothing was changed.",
        key=key,
    )
