# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Integer arithmetic of shards: flat slices, boxes, intersections, and a fingerprint that proves a tiling.

Pure: no tensors, no process groups.  Offsets and sizes count elements.  A *flat slice* is a half-open range
[start, stop) of a tensor laid out in row-major order; a *box* is an axis-aligned block of it.

    tensor (4, 3), flat slice [2, 10)      boxes: (0,2)+(1,1)   (1,0)+(2,3)   (3,0)+(1,1)
        .  .  A
        B  B  B
        B  B  B
        C  .  .
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import add

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned block of a tensor.

    Args:
        offset: First element, one index a dimension.
        size: Elements a dimension; a zero makes the box empty.

    Raises:
        ValueError: Ranks differ, or a number is negative.
    """

    offset: Shape
    size: Shape

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.size):
            raise ValueError(f"a box needs as many offsets as sizes, got {self.offset} and {self.size}")
        if min((*self.offset, *self.size), default=0) < 0:
            raise ValueError(f"a box has no negative numbers, got offset {self.offset}, size {self.size}")

    @property
    def volume(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.size)

    @property
    def end(self) -> Shape:
        """One past the last element, a dimension."""
        return tuple(map(add, self.offset, self.size))

    def part(self, dim: int, begin: int, end: int) -> Box:
        """The box's rows [begin, end) along a dimension."""
        offset = (*self.offset[:dim], self.offset[dim] + begin, *self.offset[dim + 1 :])
        return Box(offset, (*self.size[:dim], end - begin, *self.size[dim + 1 :]))

    def inside(self, shape: Shape) -> bool:
        """Whether the box lies in a tensor of this shape."""
        return len(shape) == len(self.size) and all(e <= n for e, n in zip(self.end, shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common block, or None where there is none."""
        if (self.offset, self.size) == (other.offset, other.size):  # nearly all are, in the layout of the save
            return None if 0 in self.size else self
        offset = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        size = tuple(min(a, b) - o for a, b, o in zip(self.end, other.end, offset, strict=True))
        if any(s <= 0 for s in size):
            return None
        return Box(offset, size)

    def without(self, other: Box | None) -> Iterator[Box]:
        """What is left of the block beside its part in another one: at most two boxes a dimension."""
        common = None if other is None else self.intersect(other)
        if common is None:
            yield from [self] if self.volume else []
            return
        left = self
        for dim, (begin, end) in enumerate(zip(common.offset, common.end, strict=True)):
            first = left.offset[dim]
            if begin > first:
                yield left.part(dim, 0, begin - first)
            if end < left.end[dim]:
                yield left.part(dim, end - first, left.size[dim])
            left = left.part(dim, begin - first, end - first)

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Index of this box in the array that holds `outer`."""
        return tuple(
            slice(o - base, o - base + s) for o, s, base in zip(self.offset, self.size, outer.offset, strict=True)
        )

    def run_in(self, outer: Box) -> FlatRange | None:
        """The elements of this box in the flattened array that holds `outer`, where they are one run of it."""
        strides = [math.prod(outer.size[dim + 1 :]) for dim in range(len(outer.size))]
        start = sum((o - base) * stride for o, base, stride in zip(self.offset, outer.offset, strides, strict=True))
        last = sum((e - 1 - base) * stride for e, base, stride in zip(self.end, outer.offset, strides, strict=True))
        return FlatRange(start, last + 1) if last + 1 - start == self.volume else None


def whole(shape: Shape) -> Box:
    """The box of a complete tensor."""
    return Box((0,) * len(shape), shape)


@dataclass(frozen=True, slots=True)
class FlatRange:
    """A half-open range of a flattened tensor, in elements."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"a flat range needs 0 <= start <= stop, got [{self.start}, {self.stop})")

    def __len__(self) -> int:
        return self.stop - self.start

    def intersect(self, other: FlatRange) -> FlatRange | None:
        """The common range, or None where there is none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return FlatRange(start, stop) if start < stop else None

    def shift(self, by: int) -> FlatRange:
        """The range moved by a number of elements."""
        return FlatRange(self.start + by, self.stop + by)


def boxes_of(flat: FlatRange, shape: Shape) -> Iterator[tuple[Box, FlatRange]]:
    """Split a flat range of a tensor into the fewest row-major boxes, in order.

    Megatron-FSDP cuts at whole rows of dimension 0, which gives one box; a cut inside a row gives a head and a
    tail for each dimension it crosses.

    Yields:
        Each box with the part of `flat` that it covers.

    Raises:
        ValueError: The range does not lie in the tensor.
    """
    if flat.stop > math.prod(shape):
        raise ValueError(f"[{flat.start}, {flat.stop}) lies outside a tensor of shape {shape}")
    if len(flat) == 0:
        return
    if not shape:
        yield Box((), ()), flat
        return
    row = math.prod(shape[1:])
    first, last = flat.start // row, (flat.stop - 1) // row
    head_is_whole, tail_is_whole = flat.start % row == 0, flat.stop % row == 0
    if first == last and not (head_is_whole and tail_is_whole):
        yield from _inside_row(first, row, flat, shape)
        return
    begin, end = first + (not head_is_whole), last + tail_is_whole
    if not head_is_whole:
        yield from _inside_row(first, row, FlatRange(flat.start, begin * row), shape)
    if begin < end:
        size = (end - begin, *shape[1:])
        yield Box((begin, *(0,) * (len(shape) - 1)), size), FlatRange(begin * row, end * row)
    if not tail_is_whole:
        yield from _inside_row(last, row, FlatRange(last * row, flat.stop), shape)


def _inside_row(index: int, row: int, flat: FlatRange, shape: Shape) -> Iterator[tuple[Box, FlatRange]]:
    for box, part in boxes_of(flat.shift(-index * row), shape[1:]):
        yield Box((index, *box.offset), (1, *box.size)), part.shift(index * row)
