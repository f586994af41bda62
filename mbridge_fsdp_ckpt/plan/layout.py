# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Where one rank's shard of a parameter lies in the global tensor: integers and names, checked when built."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mbridge_fsdp_ckpt.errors import LayoutError
from mbridge_fsdp_ckpt.plan.boxes import Box, FlatRange, Shape, boxes_of, whole

LAYOUT_REMEDY = "What the wrapper says of the parameter does not describe its tensor: was it replaced or resized since?"


@dataclass(frozen=True, slots=True)
class Axis:
    """This rank's place along one parallel dimension."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"an axis needs 0 <= index < count, got {self.index} of {self.count}")

    def within(self, other: Axis) -> Axis:
        """The place along both, this one's changing slower."""
        return Axis(self.index * other.count + other.index, self.count * other.count)


class HeldBox(NamedTuple):
    """A box of a parameter that a rank holds, and where in its flattened local tensor that lies.

    Args:
        box: The box, in the parameter of one tensor-parallel rank.
        source: The part of the flattened local tensor that it lies in.
        outer: Shape of that part.
        inner: The box, in that part.
    """

    box: Box
    source: FlatRange
    outer: Shape
    inner: Box


@dataclass(frozen=True, slots=True)
class BoxSet:
    """A shard that is a set of boxes, as a DTensor's may be: rows that do not follow one another are several.

    Args:
        shape: Of the local tensor.
        boxes: Each box, in the parameter, and in the local tensor; none where the shard is empty.
    """

    shape: Shape
    boxes: tuple[tuple[Box, Box], ...]


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """Where one parameter's local shard lies.

    Args:
        key: Name in the model's state dict, as on disk (`families.naming`).
        optimizer_name: Name in the optimizer's state dict, likewise.
        local_shape: Shape on one tensor-parallel rank.
        tensor_parallel_dim: The dimension tensor parallelism cuts; None where all its ranks hold the same.
        tensor_parallel: This rank's place along it.
        flat: The shard, as a range of the flattened tensor-parallel-local parameter.
        replica: This rank's place among those that hold the very same elements.
        is_copy: Whether it is a later pipeline stage's copy, which another stage writes.
        is_vocabulary: Whether dimension 0 counts tokens, and may be padded.
        copied_along: Dimensions of its device mesh along which other ranks hold the very same elements; or the numbers
            of these ranks, this one's among them.
        box_set: The shard, where it is no range; `flat` is empty then.

    Raises:
        LayoutError: The numbers contradict each other.
    """

    key: str
    optimizer_name: str
    local_shape: Shape
    tensor_parallel_dim: int | None
    tensor_parallel: Axis
    flat: FlatRange
    replica: Axis
    is_copy: bool = False
    is_vocabulary: bool = False
    copied_along: tuple[str, ...] | tuple[int, ...] = ()
    box_set: BoxSet | None = None

    def __post_init__(self) -> None:
        if self.flat.stop > math.prod(self.local_shape):
            raise LayoutError(
                expected=f"a shard inside the {math.prod(self.local_shape)} elements of shape {self.local_shape}",
                found=f"elements [{self.flat.start}, {self.flat.stop})",
                remedy=LAYOUT_REMEDY,
                key=self.key,
            )
        if self.tensor_parallel_dim is not None and not 0 <= self.tensor_parallel_dim < len(self.local_shape):
            raise LayoutError(
                expected=f"a tensor-parallel dimension of shape {self.local_shape}",
                found=f"dimension {self.tensor_parallel_dim}",
                remedy=LAYOUT_REMEDY,
                key=self.key,
            )

    def held(self) -> Iterator[HeldBox]:
        """The shard as boxes, in the order of the local tensor."""
        if self.box_set is not None:
            held = FlatRange(0, math.prod(self.box_set.shape))
            yield from (HeldBox(box, held, self.box_set.shape, inner) for box, inner in self.box_set.boxes)
            return
        for box, part in boxes_of(self.flat, self.local_shape):
            yield HeldBox(box, part.shift(-self.flat.start), box.size, whole(box.size))

    def global_shape_of(self, local_shape: Shape) -> Shape:
        """Shape over all tensor-parallel ranks of a tensor cut like this parameter."""
        if self.tensor_parallel_dim is None:
            return local_shape
        dim, count = self.tensor_parallel_dim, self.tensor_parallel.count
        return (*local_shape[:dim], local_shape[dim] * count, *local_shape[dim + 1 :])
