# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A directory that is held on to: whatever takes its place meanwhile, what was opened is what is read.

Linux resolves `/proc/self/fd/N/name` in the directory that is open as N, wherever it has been moved to, as `openat`
does.  So a held path works wherever a path does; in messages it goes by the name that it was opened by.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path, PosixPath


class _Descriptor:
    """An open directory, closed when nothing refers to it any more."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.number)


class HeldPath(PosixPath):
    """A held directory, or a path below it."""

    def __init__(self, *segments: str | os.PathLike[str], held: _Descriptor) -> None:
        super().__init__(*segments)
        self._held = held

    @classmethod
    def of(cls, directory: Path) -> Path:
        """The same directory, held on to.

        Raises:
            OSError: The file system refused.
        """
        if isinstance(directory, cls) or not directory.is_dir():
            return directory
        return cls(directory, held=_Descriptor(directory))

    def with_segments(self, *segments: str | os.PathLike[str]) -> Path:  # type: ignore[override]
        """A path made of this one: held, too, if it lies below the directory."""
        path = Path(*(str(segment) for segment in segments))
        return HeldPath(path, held=self._held) if path.is_relative_to(self._held.path) else path

    def __fspath__(self) -> str:
        relative = os.path.relpath(str(self), self._held.path)
        return f"/proc/self/fd/{self._held.number}/{relative}"
