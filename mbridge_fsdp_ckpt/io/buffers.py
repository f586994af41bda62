# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Memory that files are read into and written from past the page cache."""

from __future__ import annotations

import mmap
from contextlib import suppress


def new_block(size: int) -> mmap.mmap:
    """So many bytes, aligned for direct reads and writes; pages are taken as it is filled.

    A request to the disk has a bounded number of segments, each of one page at least: a direct read of 4 MiB is one
    request to huge pages, and several, which took twice as long, to others.  Shared memory, which `mmap` makes unless
    it is advised otherwise, gets none.
    """
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        block.madvise(mmap.MADV_HUGEPAGE)
    return block
