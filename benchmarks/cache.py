"""The page cache between a save and a load."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist


def prepare_cache(directory: Path, *, cached: bool) -> None:
    """Rank 0 reads the files, or drops them from the page cache; the others wait."""
    if dist.get_rank() == 0:
        for path in directory.iterdir():
            with path.open("rb") as file:
                if cached:
                    while file.read(1 << 24):
                        pass
                else:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()
