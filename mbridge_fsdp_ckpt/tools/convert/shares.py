# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
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

from mbridge_fsdp_ckpt.plan.boxes import Box, Shape, whole
from mbridge_fsdp_ckpt.plan.records import records_of


def even_shares(
    key: str, shape: Shape, itemsize: int, writers: int, largest: int | None = None
) -> Iterator[tuple[int, Box]]:
    """Split a tensor evenly along dimension 0, and cut each share into records.

    Args:
        key: The key of the tensor.
        shape: The global shape of the tensor.
        itemsize: Bytes an element.
        writers: How many writers there are.
        largest: Bytes of the largest record; see `records_of`.

    Yields:
        Each record in the order of its rows, with its writer.  Nothing for a tensor without elements.
    """
    first = zlib.crc32(key.encode()) % writers
    if not shape:
        yield first, Box((), ())
        return
    if not math.prod(shape):
        return
    rows = shape[0]
    for share in range(min(writers, rows)):
        writer = (first + share) % writers
        begin, end = (rows * n // min(writers, rows) for n in (share, share + 1))
        held = whole(shape).part(0, begin, end)
        yield from ((writer, record) for record in records_of(held, itemsize, largest))
