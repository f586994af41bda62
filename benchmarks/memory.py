# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Memory that costs the same whoever uses it first, and the page cache between a save and a load.

The host of a virtual machine may take back what its guest has freed (free page reporting), some two seconds later.  The
guest's next use of such a page waits for the host: over 2 s a gigabyte were measured, where a page that the guest still
had took 0.13.  Whoever allocates after a pause would pay for whoever freed before it.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from mbridge_fsdp_ckpt.io.ranges import Arena
from mbridge_fsdp_ckpt.live import huge_pages
from mbridge_fsdp_ckpt.loading import fill


def trim() -> None:
    """Give back what the allocator keeps of freed memory: whoever is measured next would take it unseen."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def prepare_cache(directory: Path, *, cached: bool) -> None:
    """Rank 0 reads the files, or drops them from the page cache; the others wait."""
    if dist.get_rank() == 0 and not cached:
        drop_from_cache(directory)
    elif dist.get_rank() == 0:
        for path in directory.iterdir():
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass
    dist.barrier()


def drop_from_cache(root: Path) -> None:
    """Have nothing in the page cache of the files below a directory, as far as they are on the disk."""
    for path in root.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Reserve:
    """Memory in use, so that the host leaves it to this machine, until somebody measured needs it.

    Args:
        size: Bytes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._memory = self._in_use()

    def _in_use(self) -> mmap.mmap:
        memory = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(memory, dtype=np.uint8)[:: mmap.PAGESIZE] = 1
        return memory

    @contextmanager
    def free(self) -> Iterator[None]:
        """While the block runs, the memory is there to be allocated."""
        self._memory.close()
        try:
            yield
        finally:
            self._memory = self._in_use()


class Beforehand:
    """Memory of a load, taken and used before it begins.

    Args:
        size: Bytes that it reads.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._asked: list[tuple[int, torch.dtype]] = []

    @contextmanager
    def seen(self) -> Iterator[None]:
        """While the block runs, note which slots a load makes."""
        self._asked.clear()
        empty = huge_pages.empty

        def noting(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            self._asked.append((count, dtype))
            return empty(count, dtype, device)

        with patch.object(huge_pages, "empty", noting):
            yield

    @contextmanager
    def taken(self) -> Iterator[None]:
        """While the block runs, a load with the same slots gets them, and room for its weights, in used memory."""
        slots = [huge_pages.empty(count, dtype, torch.device("cpu")).fill_(1) for count, dtype in self._asked]
        made, arena = iter(slots), _Used(self._size - sum(slot.nbytes for slot in slots))
        with (
            patch.object(huge_pages, "empty", lambda count, dtype, device: next(made)),
            patch.object(fill, "Arena", lambda progress: arena),
        ):
            yield


class _Used(Arena):
    """An arena whose memory is in use before it is asked for."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._memory = np.ones(size + (1 << 20), dtype=np.uint8)  # what is taken of it is aligned
