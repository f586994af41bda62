# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Who writes what several ranks hold: each of them as much as the others, so that nobody writes last and most.

All blocks that the very same ranks hold lie on one line, in the model's order, each as long as it has bytes; each rank
writes an equal part of the line.  They all have the same blocks, and cut the line alike without a word.

    3 ranks hold       a a a a a a b b b c c c
    and write          0 0 0 0 1 1 1 1 2 2 2 2       a and b are cut, between two rows
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from mbridge_fsdp_ckpt.families.naming import is_expert_name
from mbridge_fsdp_ckpt.plan.layout import ParameterLayout
from mbridge_fsdp_ckpt.plan.slices import ParameterPlan, Slice

SLIVER = 1 << 14
"""Bytes: less of a block than this is not cut off it, and a line is not cut into parts of less than twice this."""


class Part(NamedTuple):
    """Rows [begin, end) of a block, and which of the ranks that hold it writes them."""

    writer: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Line:
    """All that the same ranks hold.

    Args:
        length: Bytes of all blocks.
        ranks: How many hold them.
    """

    length: int
    ranks: int

    @property
    def writers(self) -> int:
        """How many of the ranks write: all, if there is enough of it."""
        return max(1, min(self.ranks, self.length // (2 * SLIVER)))

    def part_at(self, place: int) -> int:
        """The part of the line that a byte lies in."""
        return min(place * self.writers // max(1, self.length), self.writers - 1)

    def writer_of(self, part: int) -> int:
        """Which of the ranks writes a part; where there are fewer parts than ranks, they are spread over these."""
        return part * self.ranks // self.writers

    def parts(self, begin: int, length: int, rows: int) -> Iterator[Part]:
        """Who writes which rows of a block, in order.

        Args:
            begin: Where on the line it begins.
            length: Its bytes.
            rows: How many rows it can be cut into.
        """
        first, last = self.part_at(begin), self.part_at(begin + max(0, length - 1))
        edges = [0, *(self._row_at(part, begin, length, rows) for part in range(first + 1, last + 1)), rows]
        for part, (start, stop) in enumerate(pairwise(edges), first):
            if start < stop or first == last:
                yield Part(self.writer_of(part), start, stop)

    def _row_at(self, part: int, begin: int, length: int, rows: int) -> int:
        """The row of a block with which a part begins: its first or last one's edge, if that is near."""
        before = -(-part * self.length // self.writers) - begin
        after = length - before
        if min(before, after) < SLIVER:
            return 0 if before < after else rows
        return (2 * before * rows + length) // (2 * length)


type _Holders = tuple[bool, tuple[str, ...] | tuple[int, ...], int, int]
"""What tells apart the sets of ranks that hold the same: see `_holders`."""


def shared_out(plans: Sequence[ParameterPlan], bytes_per_element: Sequence[int]) -> list[ParameterPlan]:
    """The plans of a rank's parameters, with who writes what other ranks hold, too.

    Args:
        plans: Of all parameters that the rank has, in the order of the model, which is the same on all ranks that hold
            the same.
        bytes_per_element: Of each, with its optimizer state.
    """
    divided = divide([(plan.layout, plan.slices) for plan in plans], bytes_per_element)
    return [
        replace(plan, slices=tuple(_written_by(slice_, writer) for slice_, writer in slices))
        for plan, slices in zip(plans, divided, strict=True)
    ]


def divide(
    held: Sequence[tuple[ParameterLayout, Sequence[Slice]]], bytes_per_element: Sequence[int]
) -> Iterator[list[tuple[Slice, int | None]]]:
    """Divide what a rank holds between the ranks that hold the same.

    Args:
        held: Each parameter's layout and slices; see `shared_out`.
        bytes_per_element: See `shared_out`.

    Yields:
        For each parameter its slices, cut where two ranks write a part each, with the number of the rank that writes
        it among those that hold the same; None for a copy of what another pipeline stage writes.
    """
    lengths: dict[_Holders, int] = defaultdict(int)
    for (layout, slices), size in zip(held, bytes_per_element, strict=True):
        for slice_ in filter(partial(_is_shared, layout), slices):
            lengths[_holders(layout, slice_)] += size * slice_.box.volume
    lines = {holders: Line(length, holders[-1]) for holders, length in lengths.items()}
    filled: dict[_Holders, int] = defaultdict(int)
    for (layout, slices), size in zip(held, bytes_per_element, strict=True):
        found: list[tuple[Slice, int | None]] = []
        for slice_ in slices:
            if not _is_shared(layout, slice_):
                found.append((slice_, None if layout.is_copy else 0))
                continue
            holders, length = _holders(layout, slice_), size * slice_.box.volume
            parts = lines[holders].parts(filled[holders], length, slice_.rows)
            found += ((slice_.part(part.begin, part.end), part.writer) for part in parts)
            filled[holders] += length
        yield found


def _is_shared(layout: ParameterLayout, slice_: Slice) -> bool:
    return slice_.replica.count > 1 and not layout.is_copy


def _holders(layout: ParameterLayout, slice_: Slice) -> _Holders:
    """Ranks that hold the same as this one: the dimensions of which mesh they fill, and how many they are.

    The numbers tell apart what is copied over tensor-parallel or expert-parallel ranks besides, which no mesh names.
    """
    return is_expert_name(layout.key), layout.copied_along, layout.replica.count, slice_.replica.count


def _written_by(slice_: Slice, writer: int | None) -> Slice:
    writes = writer == slice_.replica.index
    return slice_ if slice_.writes == writes else replace(slice_, writes=writes)
