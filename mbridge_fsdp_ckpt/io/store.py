# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Where files lie: one protocol over file systems and object stores, and the one place that tells them apart.

A path is a `pathlib.Path`, or a `upath.UPath` of what fsspec reaches (`s3://...`, `msc://profile/...`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from copy import copy
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Protocol

from upath import UPath

from mbridge_fsdp_ckpt.errors import CheckpointError, ConfigurationError, brief
from mbridge_fsdp_ckpt.io.client import NamingErrors
from mbridge_fsdp_ckpt.io.file_system import FileSystem
from mbridge_fsdp_ckpt.io.object_store import ObjectStore

AnyPath = Path | UPath
_fsspec: Any = import_module("fsspec")  # it brings no types


class Ranges(Protocol):
    """A file that ranges are read from; closed when neither it nor a range that was begun is referred to any more."""

    def begin(self, offset: int, length: int) -> Callable[[memoryview, int], int]:
        """Begin to read a range.

        Returns:
            What fills memory with bytes of the range, from a place in it on; it returns how many there were.
        """

    def reader(self) -> Reader | None:
        """The same file, for threads that read ahead; None where a range is one request to the storage as it is."""


class Reader(Protocol):
    """A file that several threads read at a time."""

    def read(self, memory: memoryview, offset: int) -> int:
        """Fill memory with what the file has from a place on; both are aligned (`reading.ALIGNED`).

        Returns:
            How many bytes there were: fewer than asked for at the end of the file alone.
        """

    def close(self) -> None:
        """Nothing more is read."""


class FileWriter(Protocol):
    """A new file that is only appended to."""

    def write(self, block: bytes | memoryview) -> None:
        """Append."""

    def finish(self) -> None:
        """See to it that all of it is stored for good, and close it."""

    def close(self) -> None:
        """Close it without a word, if it is still open."""


class Store(Protocol):
    """A place, as far as file systems and object stores differ.  All of it may raise `OSError`."""

    @property
    def local(self) -> Path | None:
        """Its path in a file system, where directories can be renamed and locked; None in an object store."""

    def hold(self) -> AnyPath:
        """The same directory, held on to: what takes its place meanwhile is not read."""

    def touch(self) -> None:
        """Set its time to now, by the storage's clock; an object is written anew, empty."""

    def is_link(self) -> bool:
        """Whether it leads elsewhere."""

    def opened(self) -> AbstractContextManager[IO[bytes]]:
        """The file for reading; a link is refused."""

    def ranged(self) -> Ranges:
        """The file for reading ranges of it; a link is refused."""

    def create(self) -> FileWriter:
        """A new file; one that exists already is refused, where the store can see it."""

    def replace(self, data: bytes) -> None:
        """Put a small file in its place in one step; readers see the old content or the new."""

    def remove(self) -> None:
        """Delete the file of exactly this name, if there is one."""

    def identity(self) -> object:
        """What tells the file from another that takes its place; equal as long as it is there."""

    def below(self) -> Iterator[AnyPath]:
        """All that lies below the directory of exactly this name, each folder before what is in it; behind no link."""

    def sizes(self) -> dict[str, int]:
        """Bytes of each file below the directory, by its name in it; links are left out."""


def store_of(path: AnyPath) -> Store:
    """The place, as its kind handles it."""
    return FileSystem(path) if isinstance(path, Path) else ObjectStore(path)


def as_path(place: str | os.PathLike[str] | AnyPath) -> AnyPath:
    """A path from what a user gave: absolute where it is local.

    Raises:
        ConfigurationError: It is empty, or a URL that nothing installed here can open.
    """
    if isinstance(place, Path):
        return place.absolute()
    if isinstance(place, UPath):
        return _opened(str(place), lambda: place)
    text = _given(os.fspath(place)).removeprefix("file://")
    if "://" not in text:
        return Path(text).absolute()
    return _opened(text, lambda: _of_url(text))


def _of_url(text: str) -> UPath:
    _fsspec.get_filesystem_class(text.partition("://")[0])
    return UPath(text, use_listings_cache=False)  # other processes write there, too


def _opened(text: str, path: Callable[[], UPath]) -> UPath:
    """A path whose client raises errors of ours.

    Raises:
        ConfigurationError: The client cannot be made.
    """
    try:
        return _with_named_errors(path())
    except CheckpointError:
        raise
    except Exception as error:  # what a client says of a URL, or of its own configuration, as it is made
        raise ConfigurationError(
            expected="a path, or a URL that fsspec can open",
            found=brief(error),
            remedy="Check the URL and its client's configuration, and install the store's own package (s3fs, "
            "multi-storage-client, ...).",
            key=text,
        ) from error


def _with_named_errors(path: UPath) -> UPath:
    """The same path with a client that names errors, which derived paths get as well; the caller's own keeps its."""
    if isinstance(path.fs, NamingErrors):
        return path
    client: Any = NamingErrors(path.fs, str(path))
    path = copy(path)
    path._fs_cached = client
    return path


def is_local(path: AnyPath) -> bool:
    """Whether it is a file system's, not an object store's."""
    return store_of(path).local is not None


def called(directory: str | os.PathLike[str] | AnyPath) -> str:
    """The directory as all ranks call it, before anything is asked of its storage.

    Raises:
        ConfigurationError: It is empty.
    """
    if isinstance(directory, Path):
        return str(directory.absolute())
    text = _given(str(directory))
    return text if "://" in text else str(Path(text).absolute())


def _given(text: str) -> str:
    """A path that somebody wrote: an empty one would be the working directory."""
    if not text.removeprefix("file://").strip():
        raise ConfigurationError(
            expected="a directory, a file or a URL",
            found="an empty path",
            remedy="Is a variable of your shell or configuration not set? Write . for the working directory.",
        )
    return text
