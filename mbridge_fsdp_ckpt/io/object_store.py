# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A place in an object store, or in whatever else fsspec reaches: objects appear whole, and nothing is renamed."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, cast

from upath import UPath

_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """See `store.Store`.

    Args:
        path: The place.
    """

    path: UPath

    @property
    def local(self) -> None:
        """See `store.Store`."""

    def hold(self) -> UPath:
        """See `store.Store`; payload and index files have names of their own in each save."""
        return self.path

    def touch(self) -> None:
        """See `store.Store`.  Of an object, fsspec's own `touch` sets no time."""
        self.path.write_bytes(b"")

    def is_link(self) -> bool:
        """See `store.Store`."""
        return False

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """See `store.Store`."""
        with self.path.open("rb") as raw, io.BufferedReader(cast("io.RawIOBase", raw), _BLOCK) as buffered:
            yield buffered  # fsspec's own readline takes no limit

    def ranged(self) -> _Object:
        """See `store.Store`."""
        return _Object(self.path)

    def create(self) -> _Upload:
        """See `store.Store`."""
        return _Upload(self.path)

    def replace(self, data: bytes) -> None:
        """See `store.Store`."""
        self.path.write_bytes(data)

    def remove(self) -> None:
        """See `store.Store`.  `UPath.unlink` takes brackets, stars and question marks in a name for a pattern."""
        with suppress(FileNotFoundError):
            self.path.fs.rm_file(self.path.path)

    def identity(self) -> object:
        """See `store.Store`: an entity tag where there is one; some stores tell times in whole seconds, or none."""
        return self.path.fs.checksum(self.path.path)

    def below(self) -> Iterator[UPath]:
        """See `store.Store`: its objects; `UPath.rglob` takes the directory for a pattern, too."""
        place = self.path.path.rstrip("/") + "/"
        return (self.path / name.removeprefix(place) for name in sorted(self.path.fs.find(place)))

    def sizes(self) -> dict[str, int]:
        """See `store.Store`: one listing."""
        place = self.path.path.rstrip("/") + "/"
        return {name.removeprefix(place): int(i["size"]) for name, i in self.path.fs.find(place, detail=True).items()}


class _Object:
    """See `store.Ranges`; a range is one request."""

    def __init__(self, path: UPath) -> None:
        self._path = path

    def begin(self, offset: int, length: int) -> Callable[[memoryview, int], int]:
        """See `store.Ranges`."""
        content = self._fetched(offset, length) if length else b""

        def fill(memory: memoryview, start: int) -> int:
            part = memoryview(content)[start : start + len(memory)]
            memory[: len(part)] = part
            return len(part)

        return fill

    def _fetched(self, offset: int, length: int) -> bytes:
        if self._path.protocol != "msc":
            return bytes(self._path.fs.cat_file(self._path.path, start=offset, end=offset + length))
        with self._path.open("rb") as file:  # Multi-Storage Client's cat_file returns all of it
            file.seek(offset)
            return bytes(file.read(length))

    def reader(self) -> None:
        """See `store.Ranges`."""


class _Upload:
    """See `store.FileWriter`."""

    def __init__(self, path: UPath) -> None:
        self._file: Any = path.open("wb")
        self._finished = False

    def write(self, block: bytes | memoryview) -> None:
        """See `store.FileWriter`."""
        self._file.write(block)

    def finish(self) -> None:
        """See `store.FileWriter`."""
        self._file.close()
        self._finished = True

    def close(self) -> None:
        """See `store.FileWriter`; what is not finished never appears."""
        if not self._finished:
            self._file.discard()
