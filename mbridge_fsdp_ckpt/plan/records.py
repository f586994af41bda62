# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""How a block becomes records of bounded size, and which part of a record a load reads.  Pure.

Stock reads records as a whole: in a layout with other borders, ranks on both sides of a border read the record that it
cuts, and many ranks that load what few have saved read each record many times.  Cut by rows, the records of a block
are runs of its bytes, one after the other:

    block (5, 4), at most 8 elements     rows 0, 1 and 2, 3 and 4     even, and no sliver at the end
    block (2, 3, 8), at most 16          0: 0, 1 and 2    1: 0, 1 and 2

A load of this format reads less.  The elements of a record are hashed in blocks of `HASHED_BLOCK` bytes; of a record of
which some rows are wanted, it reads and verifies the blocks that have bytes of them:

    record (5, 4), 8 bytes a row, blocks of 16     rows 1 and 2 are wanted: bytes 8 to 24, blocks 0 and 1 of 3
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from mbridge_fsdp_ckpt.plan.boxes import Box

LARGEST_RECORD = 1 << 25
"""Bytes of elements of the largest record, unless a single element is larger."""

HASHED_BLOCK = 1 << 20
"""Bytes of a record's elements that have a checksum of their own; a smaller record has one for all of it."""


def records_of(box: Box, itemsize: int, largest: int | None = None) -> Iterator[Box]:
    """Cut a block into the boxes of its records.

    Args:
        box: The block.
        itemsize: Bytes an element.
        largest: Bytes of the largest record; None for `LARGEST_RECORD`.

    Yields:
        Boxes that follow one another in the block's row-major order, each one run of it; the block itself where it is
        no larger, or has no elements.
    """
    elements = max(1, (largest or LARGEST_RECORD) // itemsize)
    if box.volume <= elements:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.size) if size > 1)
    rows = box.size[dim]
    at_once = max(1, elements // (box.volume // rows))  # a row that is larger is cut itself
    count = -(-rows // at_once)
    for begin, end in pairwise(rows * number // count for number in range(count + 1)):
        yield from records_of(box.part(dim, begin, end), itemsize, largest)


class Part(NamedTuple):
    """What is read of a record.

    Args:
        box: Whole rows, one run of the record's elements: all that is wanted.
        begin: The first byte that is read, of the record's elements, where a block begins.
        end: One past the last one, where a block ends.
        skipped: Bytes that are read before the first one of `box`.
    """

    box: Box
    begin: int
    end: int
    skipped: int


def part_of(record: Box, itemsize: int, wanted: Sequence[Box]) -> Part | None:
    """What to read of a record of which some blocks are wanted; None if that is all of it.

    Args:
        record: Its box.
        itemsize: Bytes an element.
        wanted: The blocks; those outside of the record are ignored.
    """
    size = record.volume * itemsize
    if size <= HASHED_BLOCK:
        return None
    common = [both for box in wanted if (both := record.intersect(box)) is not None]
    if not common or common[0] == record:
        return None
    dim = next(dim for dim, extent in enumerate(record.size) if extent > 1)
    first, last = min(box.offset[dim] for box in common), max(box.end[dim] for box in common)
    row = size // record.size[dim]
    low, high = (row * (edge - record.offset[dim]) for edge in (first, last))
    begin, end = low - low % HASHED_BLOCK, min(size, -(-high // HASHED_BLOCK) * HASHED_BLOCK)
    if (begin, end) == (0, size):
        return None
    rows = record.part(dim, first - record.offset[dim], last - record.offset[dim])
    return Part(rows, begin, end, low - begin)
