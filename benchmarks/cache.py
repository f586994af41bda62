# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The page cache between a save and a load."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist


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
