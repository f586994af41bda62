# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A place in a file system: opened without following links, flushed to disk, replaced in one step."""

from __future__ import annotations

import errno
import os
import re
import stat
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from mbridge_fsdp_ckpt.io.direct_writer import DirectWriter
from mbridge_fsdp_ckpt.io.held_path import HeldPath
from mbridge_fsdp_ckpt.io.reading import FileReader

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{12}\.new")
"""Name of a file that is about to replace another, or is removed at once."""


def temporary_name(name: str) -> str:
    """A new one."""
    return f".{name}.{uuid.uuid4().hex[:12]}.new"


@dataclass(frozen=True, slots=True)
class FileSystem:
    """See `store.Store`.

    Args:
        path: The place.
    """

    path: Path

    @property
    def local(self) -> Path:
        """See `store.Store`."""
        return self.path

    def hold(self) -> Path:
        """See `store.Store`."""
        return HeldPath.of(self.path)

    def touch(self) -> None:
        """See `store.Store`."""
        os.utime(self.path)

    def is_link(self) -> bool:
        """See `store.Store`."""
        return self.path.is_symlink()

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """See `store.Store`."""
        with os.fdopen(_open(self.path), "rb") as file:
            yield file

    def ranged(self) -> _OpenFile:
        """See `store.Store`."""
        return _OpenFile(_open(self.path))

    def create(self) -> DirectWriter:
        """See `store.Store`."""
        return DirectWriter(self.path)

    def replace(self, data: bytes) -> None:
        """See `store.Store`."""
        temporary = self.path.with_name(temporary_name(self.path.name))
        try:
            with closing(FileSystem(temporary).create()) as file:
                file.write(data)
                file.finish()
            temporary.replace(self.path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(self.path.parent)

    def remove(self) -> None:
        """See `store.Store`."""
        self.path.unlink(missing_ok=True)

    def identity(self) -> tuple[int, ...]:
        """See `store.Store`."""
        status = self.path.stat()
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def below(self) -> Iterator[Path]:
        """See `store.Store`.

        Raises:
            OSError: A folder may not be read: pathlib's patterns leave it out without a word.
        """
        for folder, folders, names in self.path.walk(on_error=_raised):
            yield from (folder / name for name in sorted((*folders, *names)))

    def sizes(self) -> dict[str, int]:
        """See `store.Store`."""
        found = ((path, path.lstat()) for path in self.below())
        return {
            path.relative_to(self.path).as_posix(): status.st_size
            for path, status in found
            if stat.S_ISREG(status.st_mode)
        }


def _raised(error: OSError) -> NoReturn:
    raise error


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


class _OpenFile:
    """See `store.Ranges`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def begin(self, offset: int, length: int) -> Callable[[memoryview, int], int]:
        """See `store.Ranges`."""

        def fill(memory: memoryview, start: int) -> int:  # refers to the file, and so keeps it open
            filled = 0
            while filled < len(memory):
                count = os.preadv(self._descriptor, [memory[filled:]], offset + start + filled)
                if count == 0:
                    break
                filled += count
            return filled

        os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_WILLNEED)  # hashed blocks are small for a disk
        return fill

    def reader(self) -> FileReader:
        """See `store.Ranges`."""
        return FileReader(self._descriptor)


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync directories
            raise
    finally:
        os.close(descriptor)
