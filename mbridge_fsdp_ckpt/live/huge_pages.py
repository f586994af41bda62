# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""New memory of the host in huge pages: the kernel hands out and clears those of 4 KiB far slower than a disk reads."""

from __future__ import annotations

import ctypes
import mmap

import torch

_LIBC = ctypes.CDLL(None)


def empty(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """So many unfilled elements; on the host in huge pages, as far as the kernel has them."""
    made = torch.empty(count, dtype=dtype, device=device)
    if device.type == "cpu":
        begin = -(-made.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = made.data_ptr() + made.nbytes - begin
        if length > 0:  # no more than advice: a kernel that does not take it does what it did before
            _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
    return made
