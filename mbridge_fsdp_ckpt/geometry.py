"""Integer arithmetic of shards: flat slices, boxes, intersections, and a sketch that proves a tiling.

Pure: no tensors, no process groups.  Offsets and sizes count elements.  A *flat slice* is a half-open range
[start, stop) of a tensor laid out in row-major order; a *box* is an axis-aligned block of it.

    tensor (4, 3), flat slice [2, 10)      boxes: (0,2)+(1,1)   (1,0)+(2,3)   (3,0)+(1,1)
        .  .  A
        B  B  B
        B  B  B
        C  .  .
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Shape = tuple[int, ...]
PRIME = (1 << 61) - 1
"""Modulus of sketches."""
_SALT = secrets.token_hex(8)


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
        if any(number < 0 for number in (*self.offset, *self.size)):
            raise ValueError(f"a box has no negative numbers, got offset {self.offset}, size {self.size}")

    @property
    def volume(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.size)

    @property
    def end(self) -> Shape:
        """One past the last element, a dimension."""
        return tuple(o + s for o, s in zip(self.offset, self.size, strict=True))

    def inside(self, shape: Shape) -> bool:
        """Whether the box lies in a tensor of this shape."""
        return len(shape) == len(self.size) and all(e <= n for e, n in zip(self.end, shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common block, or None where there is none."""
        offset = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        size = tuple(min(a, b) - o for a, b, o in zip(self.end, other.end, offset, strict=True))
        if any(s <= 0 for s in size):
            return None
        return Box(offset, size)

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Index of this box in the array that holds `outer`."""
        return tuple(
            slice(o - base, o - base + s) for o, s, base in zip(self.offset, self.size, outer.offset, strict=True)
        )


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


@dataclass(frozen=True, slots=True)
class TilingSketch:
    """A number that is zero, summed over all writers, if and (almost surely) only if the boxes tile the tensor.

    Element (i, j, ...) of a tensor has the weight r0**i * r1**j * ..., modulo a prime of 61 bits, with pseudo-random
    rd that come from the tensor's identity.  Sums over boxes have a closed form, so a writer's share costs nothing
    per element, and sums of different ranks may be added in any order.  A row that nobody or two ranks write, or two
    ranks that disagree on the identity (key, shape, dtype), leave a remainder.

    Tried before: volumes alone, where a hole and an overlap of one size cancel out; and weights that are quadratic in
    the index, where rows of equal sums and equal squares do.
    """

    roots: tuple[int, ...]
    shape: Shape

    @classmethod
    def of(cls, identity: str, shape: Shape) -> TilingSketch:
        """Sketch of a tensor that all ranks know by the same identity and shape."""
        return cls(tuple(_root(f"{identity}|{shape}|{dim}") for dim in range(max(1, len(shape)))), shape)

    def of_box(self, box: Box) -> int:
        """The box's share, modulo `PRIME`."""
        share = self.roots[0] if not self.shape else 1
        for root, low, size in zip(self.roots, box.offset, box.size, strict=False):
            share = share * _power_sum(root, low, size) % PRIME
        return share

    def of_whole(self) -> int:
        """What the shares of a complete tiling add up to, modulo `PRIME`."""
        return self.of_box(whole(self.shape))


def _root(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return 2 + int.from_bytes(digest, "little") % (PRIME - 3)


def _power_sum(root: int, low: int, size: int) -> int:
    """Sum of root**i over low <= i < low + size."""
    return pow(root, low, PRIME) * (pow(root, size, PRIME) - 1) * pow(root - 1, -1, PRIME) % PRIME


def tiling_defect(target: Box, boxes: Iterable[Box]) -> str:
    """What keeps the boxes from covering each element of `target` exactly once, in words; empty where nothing does.

    A hole and an overlap of one size are told apart from a tiling by `TilingSketch`, with weights that nobody who
    makes up a checkpoint can know.
    """
    parts = [part for box in boxes if (part := target.intersect(box)) is not None]
    sketch = TilingSketch.of(_SALT, target.end)
    if sum(map(sketch.of_box, parts)) % PRIME == sketch.of_box(target):
        return ""
    rest = target.volume - sum(part.volume for part in parts)
    if rest > 0:
        return f"{rest} elements uncovered"
    return f"{-rest} elements covered twice" if rest else "some elements uncovered, as many covered twice"
