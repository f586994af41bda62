"""Which writer of a rewritten checkpoint gets which blocks.  Pure.

An even split along dimension 0, of a tensor (5, 3) over 3 writers whose first is writer 2:

    row 0           writer 2
    rows 1 and 2    writer 0
    rows 3 and 4    writer 1

The first writer follows from the key, so that tensors with fewer rows than there are writers spread over all.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

from mbridge_fsdp_ckpt.plan.boxes import Box, Shape

LARGEST_CHUNK = 1 << 26
"""Bytes of the largest block, unless a single row is larger: who loads in a finer layout verifies whole blocks."""


def even_shares(
    key: str, shape: Shape, itemsize: int, writers: int, largest: int = LARGEST_CHUNK
) -> Iterator[tuple[int, Box]]:
    """Split a tensor evenly along dimension 0, and cut each share into blocks of bounded size.

    Args:
        key: Its key.
        shape: Its global shape.
        itemsize: Bytes an element.
        writers: How many writers there are.
        largest: Bytes of the largest block that has more than one row.

    Yields:
        Each block in the order of its rows, with its writer.  Nothing for a tensor without elements.
    """
    first = zlib.crc32(key.encode()) % writers
    if not shape:
        yield first, Box((), ())
        return
    if not math.prod(shape):
        return
    rows, rest = shape[0], shape[1:]
    at_once = max(1, largest // (math.prod(rest) * itemsize))
    for share in range(min(writers, rows)):
        writer = (first + share) % writers
        begin, end = (rows * n // min(writers, rows) for n in (share, share + 1))
        for start in range(begin, end, at_once):
            yield writer, Box((start, *(0,) * len(rest)), (min(at_once, end - start), *rest))
