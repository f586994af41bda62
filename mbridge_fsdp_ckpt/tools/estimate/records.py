# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""How many bytes a block takes in a payload file: its elements, and what is written around those of each record."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import IO, NamedTuple, cast

import torch

from mbridge_fsdp_ckpt.format.payload import without_crc32
from mbridge_fsdp_ckpt.format.sums import sums_bytes
from mbridge_fsdp_ckpt.plan.boxes import Shape, whole
from mbridge_fsdp_ckpt.plan.records import records_of

_ALIGNMENT = 64
_ZIP64 = 1 << 32


class Records(NamedTuple):
    """Those of a block, or of several.

    Args:
        bytes: Of all together.
        chunks: How many they are.
    """

    bytes: int
    chunks: int


_around: dict[tuple[torch.dtype, tuple[int, ...], int, bool], int] = {}


def records_in(size: Shape, dtype: torch.dtype) -> Records:
    """The records that a block is cut into."""
    sizes = [record_bytes(box.size, dtype) for box in records_of(whole(size), dtype.itemsize)]
    return Records(sum(sizes), len(sizes))


def record_bytes(size: Shape, dtype: torch.dtype) -> int:
    """Bytes of a record.

    What stands around the elements depends on how long the numbers in it are, and on where the elements end, alone:
    `torch.save` is asked once for each such form.
    """
    count = math.prod(size)
    elements = count * dtype.itemsize
    form = dtype, tuple(map(_width, (*size, *_strides(size), count))), elements % _ALIGNMENT, elements >= _ZIP64
    if form not in _around:
        _around[form] = _saved_bytes(size, dtype) - elements
    return elements + _around[form] + sums_bytes(elements)


def _saved_bytes(size: Shape, dtype: torch.dtype) -> int:
    counted = _Counted()
    with without_crc32():
        torch.save(torch.empty(size, dtype=dtype), cast("IO[bytes]", counted))
    return counted.bytes


class _Counted:
    """A file that only counts."""

    def __init__(self) -> None:
        self.bytes = 0

    def write(self, data: memoryview) -> int:
        """Count."""
        length = memoryview(data).nbytes
        self.bytes += length
        return length

    def flush(self) -> None:
        """`torch.save` calls this."""


def _strides(size: Shape) -> Iterator[int]:
    for index in range(len(size)):
        yield math.prod(max(1, extent) for extent in size[index + 1 :])


def _width(number: int) -> int:
    """How many bytes pickle takes for a number."""
    if number < 1 << 8:
        return 1
    if number < 1 << 16:
        return 2
    return 4 if number < 1 << 31 else number.bit_length() // 8 + 1
