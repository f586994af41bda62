# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A checkpoint as one small file: records of tiny tensors are nearly all frame, and shrink to a twentieth."""

from __future__ import annotations

import tarfile
from pathlib import Path

SUFFIX = ".tar.xz"


def pack(directory: Path, archive: Path) -> None:
    """The directory's files; the same bytes for the same files."""
    with tarfile.open(archive, "w:xz", preset=9) as packed:
        for file in sorted(directory.iterdir()):
            entry = tarfile.TarInfo(file.name)
            entry.size = file.stat().st_size
            with file.open("rb") as content:
                packed.addfile(entry, content)


def unpack(archive: Path, directory: Path) -> Path:
    """The checkpoint, in a new directory."""
    directory.mkdir(parents=True)
    with tarfile.open(archive) as packed:
        packed.extractall(directory, filter="data")
    return directory
