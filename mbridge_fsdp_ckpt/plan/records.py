"""How a block becomes records of bounded size.  Pure.

A record is verified as a whole, so whoever loads a part of its rows reads all of it: in a layout with other borders,
the ranks on both sides of a border read the record that it cuts, and many ranks that load what few have saved read
each record many times.  Cut by rows, the records of a block are runs of its bytes, one after the other:

    block (5, 4), at most 8 elements     rows 0, 1 and 2, 3 and 4     even, and no sliver at the end
    block (2, 3, 8), at most 16          0: 0, 1 and 2    1: 0, 1 and 2
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from mbridge_fsdp_ckpt.plan.boxes import Box

LARGEST_RECORD = 1 << 25
"""Bytes of elements of the largest record, unless a single element is larger."""


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
