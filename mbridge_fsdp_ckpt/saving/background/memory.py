# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Memory shared with the checkpoint process: a ring of portions, each stamped with the save that it belongs to.

What a rank writes is one stream of bytes, chunk after chunk.  Portion n of it lies at place n modulo the places: with a
place for each, all of a save is staged at once; with fewer, the training process waits until the other has read what
lies there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

PORTION = 1 << 23
"""Bytes that are handed over at once."""

ALIGNED = 64
"""A chunk begins at a multiple: of every dtype's size, and of a cache line."""

FEWEST = 2
"""Slots: one is filled while the other is read."""

_STAMP = struct.Struct("<QQ")
_PAGE = 4096


def length_of(sizes: Iterable[int]) -> int:
    """Bytes of the stream that has chunks of these sizes."""
    position = 0
    for size in sizes:
        position = aligned(position) + size
    return position


def aligned(position: int) -> int:
    """The next place where a chunk may begin."""
    return -(-position // ALIGNED) * ALIGNED


def capacity_for(length: int, limit: int | None) -> int:
    """How many portions the staging memory of a stream holds.

    Args:
        length: The bytes of the memory.
        limit: Bytes that all portions may have together; None for no limit.
    """
    wanted = max(FEWEST, -(-length // PORTION))
    return wanted if limit is None else max(FEWEST, min(wanted, limit // PORTION))


def _header_of(capacity: int) -> int:
    """Bytes before the first portion: a stamp for each portion, in whole pages."""
    return -(-capacity * _STAMP.size // _PAGE) * _PAGE


class Staging:
    """The memory, as one of both sides sees it.  It takes pages as it is filled.

    Args:
        descriptor: Of the shared memory.  Owned, and closed with it.
        capacity: How many portions it holds.
    """

    def __init__(self, descriptor: int, capacity: int) -> None:
        self.descriptor, self.capacity = descriptor, capacity
        head = _header_of(capacity)
        self._map = mmap.mmap(descriptor, head + capacity * PORTION)
        self._map.madvise(mmap.MADV_DONTFORK)  # a data loader that outlives it would keep its pages
        self.before_close: Callable[[], None] = lambda: None
        """Called before it is given back: to undo what was done to it."""
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8, offset=head)

    @classmethod
    def create(cls, capacity: int) -> Staging:
        """New memory.

        Raises:
            OSError: There is none to be had.
        """
        descriptor = os.memfd_create("mbridge_fsdp_ckpt")
        try:
            os.ftruncate(descriptor, _header_of(capacity) + capacity * PORTION)
            return cls(descriptor, capacity)
        except BaseException:
            os.close(descriptor)
            raise

    def place(self, portion: int) -> int:
        """Where a portion begins in `bytes`."""
        return portion % self.capacity * PORTION

    def stamp(self, portion: int, save: int) -> None:
        """Once all of a portion is there: say so, and whose it is."""
        _STAMP.pack_into(self._map, portion % self.capacity * _STAMP.size, save, portion)

    def has(self, portion: int, save: int) -> bool:
        """Whether what lies there is this portion of this save."""
        return _STAMP.unpack_from(self._map, portion % self.capacity * _STAMP.size) == (save, portion)

    def close(self) -> None:
        """Give it back: its pages are free once both sides have, and nothing of either refers to `bytes`."""
        self.before_close()
        self.bytes = np.empty(0, dtype=np.uint8)
        del self._map
        os.close(self.descriptor)

    def forget(self) -> None:
        """In a forked child, where it is not mapped: unmapping it would hit whatever has taken its addresses."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._map))
        own = os.fstat(self.descriptor)
        for entry in Path("/proc/self/fd").iterdir():  # `mmap` has a descriptor of its own
            with suppress(OSError):
                if os.path.samestat(os.fstat(int(entry.name)), own):
                    os.close(int(entry.name))
