# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint: bounded reads, plain files only, named errors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import IO, NoReturn

from mbridge_fsdp_ckpt.errors import DamagedCheckpointError, ManifestError
from mbridge_fsdp_ckpt.io.checksums import Hasher
from mbridge_fsdp_ckpt.io.entries import FileEntry
from mbridge_fsdp_ckpt.io.file_system import FileSystem
from mbridge_fsdp_ckpt.io.store import AnyPath, store_of

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
"""What JSON can say."""

_BLOCK = 1 << 22
_REMEDY = "The checkpoint is damaged or was edited: use another one."


def is_plain_file(path: AnyPath) -> bool:
    """A file that is there and is no link."""
    return path.is_file() and not store_of(path).is_link()


def hold(directory: AnyPath) -> AnyPath:
    """The same directory, held on to where its store can: see `held_path`.

    Raises:
        OSError: The storage refused.
    """
    return store_of(directory).hold()


def walk(directory: Path) -> Iterator[Path]:
    """All that lies below a directory of a file system: see `everything_in`."""
    return FileSystem(directory).below()


def everything_in(directory: AnyPath) -> Iterator[AnyPath]:
    """All that lies below a directory, each folder before what is in it; no link is followed.

    Raises:
        OSError: A folder may not be read.
    """
    return store_of(directory).below()


def entries(directory: AnyPath, beginning: str = "") -> list[AnyPath]:
    """What lies in a directory, by how its name begins; nothing where it is none.

    By name, never by pattern: names of directories and URLs may have brackets, stars and question marks.

    Raises:
        OSError: The storage refused: what lies there is not known.
    """
    try:
        return [path for path in directory.iterdir() if path.name.startswith(beginning)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def size_of(path: AnyPath) -> int:
    """Bytes."""
    return int(path.stat().st_size)


def check_file(directory: AnyPath, entry: FileEntry, listed_in: str = "") -> AnyPath:
    """The path of a file that exists in the directory, as a plain file of its recorded size.

    Args:
        directory: The directory.
        entry: The file's record.
        listed_in: The file that has the record: where the two disagree, either may be the damaged one.

    Raises:
        DamagedCheckpointError: It is missing, a link, or of another size.
    """
    path, as_listed = directory / entry.name, f", as {listed_in} has it" if listed_in else ""
    linked = has_link(directory, entry.name)
    if linked or not path.is_file():
        of_size = f" of {entry.size} bytes" if entry.size else ""  # 0 also where nobody knows it
        raise DamagedCheckpointError(
            expected=f"file {entry.name}{of_size}{as_listed}",
            found="a symbolic link" if linked else "no such file",
            remedy="Use another checkpoint; its files must not be moved or linked.",
            key=str(path),
        )
    size = size_of(path)
    if size != entry.size:
        raise DamagedCheckpointError(
            expected=f"{entry.size} bytes{as_listed}",
            found=f"{size} bytes",
            remedy="The file was truncated or overwritten: use another checkpoint.",
            key=str(path),
        )
    return path


def has_link(directory: AnyPath, name: str) -> bool:
    """Whether the file, or a folder on the way to it from the directory, is a link."""
    path = directory
    for part in name.split("/"):
        path /= part
        if store_of(path).is_link():
            return True
    return False


def check_content(
    directory: AnyPath, entry: FileEntry, progress: Callable[[], None] = lambda: None, listed_in: str = ""
) -> AnyPath:
    """Like `check_file`, and its bytes are those that were written.

    Raises:
        DamagedCheckpointError: They are not.
    """
    path = check_file(directory, entry, listed_in)
    _check_checksum(path, entry, file_checksum(path, progress), listed_in)
    return path


def _check_checksum(path: AnyPath, entry: FileEntry, found: str, listed_in: str) -> None:
    if found != entry.checksum:
        raise DamagedCheckpointError(
            expected=entry.checksum + (f", as {listed_in} has it" if listed_in else ""),
            found=found,
            remedy="The file was changed after it was written: use another checkpoint.",
            key=str(path),
        )


def file_checksum(path: AnyPath, progress: Callable[[], None] = lambda: None) -> str:
    """Checksum of a whole file, read block by block."""
    hasher = Hasher()
    for block in blocks(path):
        hasher.update(block)
        progress()
    return hasher.result()


def copy_file(
    path: AnyPath,
    target: Path,
    entry: FileEntry | None,
    progress: Callable[[int], None] = lambda count: None,
    listed_in: str = "",
) -> None:
    """Copy a file to one that is not there yet; where it has a record, check that its bytes are those of the record.

    Args:
        path: The file.
        target: Its copy.
        entry: The file's record.
        progress: Called with the number of bytes of each block.
        listed_in: The file that has the record.

    Raises:
        DamagedCheckpointError: They are not.
        OSError: The storage refused.
    """
    hasher = Hasher()
    with target.open("xb") as file:
        for block in blocks(path):
            hasher.update(block)
            file.write(block)
            progress(len(block))
    if entry is not None:
        _check_checksum(path, entry, hasher.result(), listed_in)


def blocks(path: AnyPath) -> Iterator[bytes]:
    """A file, a few megabytes at a time."""
    with opened(path) as file:
        while block := file.read(_BLOCK):
            yield block


def opened(path: AnyPath) -> AbstractContextManager[IO[bytes]]:
    """The file for reading; a link is refused."""
    return store_of(path).opened()


def write_file(path: AnyPath, data: bytes) -> None:
    """Write a file that is not there yet, and flush it to disk.

    Raises:
        OSError: The storage refused.
    """
    with closing(store_of(path).create()) as file:
        file.write(data)
        file.finish()


def replace_file(path: AnyPath, data: bytes) -> None:
    """Replace a small file in one step; readers see the old content or the new."""
    store_of(path).replace(data)


def read_bounded(path: AnyPath, limit: int) -> bytes:
    """A small file's content.

    Raises:
        ManifestError: It is larger than the limit.
    """
    size = size_of(path)
    if size > limit:
        raise malformed(path, f"at most {limit} bytes", f"{size}")
    with opened(path) as file:
        return file.read(size)  # of the limit, Python would reserve the memory first


def parse_json(path: AnyPath, data: bytes) -> Json:
    """JSON in UTF-8, without duplicate keys, and without the NaN and Infinity that Python would take.

    Raises:
        ManifestError: It is not, or what it describes does not fit into memory.
    """
    try:
        found: Json = json.loads(str(data, "utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError, MemoryError) as error:
        raise malformed(path, "JSON", f"{type(error).__name__}: {error}"[:300]) from error
    return found


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"duplicate key {counts.most_common(1)[0][0]!r}"[:200])
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def malformed(path: AnyPath, expected: str, found: str) -> ManifestError:
    """The error for a file that contradicts the format."""
    return ManifestError(expected=expected, found=found, remedy=_REMEDY, key=str(path))


def what_is_there(directory: AnyPath) -> str:
    """The directory's first entries, for an error."""
    if not directory.exists():
        return "no such directory"
    names = sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else ["a file"]
    return "an empty directory" if not names else ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
