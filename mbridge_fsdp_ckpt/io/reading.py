# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Reading a file of which little is in the page cache: past it, for what is read once needs no page there.

The page cache costs a page and a copy for every 4 KiB; from where it has the bytes already, nothing is faster.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

import numpy as np

ALIGNED = max(4096, mmap.PAGESIZE)
"""Places, lengths and memory that are multiples of it may bypass the page cache."""

_LIBC = ctypes.CDLL(None, use_errno=True)


class FileReader:
    """See `store.Reader`.

    Args:
        descriptor: The open file; it may be closed meanwhile.

    Raises:
        OSError: Too many files are open.
    """

    def __init__(self, descriptor: int) -> None:
        self._cached, self._direct = os.dup(descriptor), -1
        try:
            # the same file, whatever has its name by now, and flags of its own
            self._direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.EMFILE:
                self.close()
                raise

    def read(self, memory: memoryview, offset: int) -> int:
        """See `store.Reader`."""
        filled = 0
        if self._direct >= 0 and not is_cached(self._cached, offset, len(memory)):
            filled = self._read_directly(memory, offset)
        else:
            os.posix_fadvise(self._cached, offset, len(memory), os.POSIX_FADV_WILLNEED)
        while filled < len(memory):
            count = os.preadv(self._cached, [memory[filled:]], offset + filled)
            if not count:
                break
            filled += count
        return filled

    def _read_directly(self, memory: memoryview, offset: int) -> int:
        """Whole sectors, as many as can be had."""
        filled = 0
        while filled < len(memory) and not filled % ALIGNED:
            try:
                count = os.preadv(self._direct, [memory[filled:]], offset + filled)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                break
            if not count:
                break
            filled += count
        return filled

    def close(self) -> None:
        """See `store.Reader`."""
        os.close(self._cached)
        if self._direct >= 0:
            os.close(self._direct)


def is_cached(descriptor: int, offset: int, length: int) -> bool:
    """Whether the page cache has half of a range, or more; also where this user may not know."""
    length = min(length, os.fstat(descriptor).st_size - offset)
    if length <= 0:
        return True
    try:
        mapping = mmap.mmap(descriptor, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=offset)
    except (OSError, ValueError):  # no such thing there, or it is shorter by now
        return True
    with mapping:
        pages = np.zeros(-(-length // mmap.PAGESIZE), dtype=np.uint8)
        address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
        done = _LIBC.mincore(ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_void_p(pages.ctypes.data))
    return done != 0 or 2 * int(np.count_nonzero(pages & 1)) >= pages.size
