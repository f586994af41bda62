# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Files that the caller adds to a checkpoint: regular files in regular folders, under names that are free.

A link would lead out of the checkpoint, or to nothing once it is moved; who opens a pipe waits for its other end.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from mbridge_fsdp_ckpt.commit.target import is_root, names_in
from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.format.names import is_part
from mbridge_fsdp_ckpt.io.entries import ExtraEntry
from mbridge_fsdp_ckpt.io.files import has_link, walk
from mbridge_fsdp_ckpt.io.store import AnyPath, store_of

_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def added_by(add_files: Callable[[Path], None], folder: Path) -> list[str]:
    """Let the caller add files to a folder of its own.

    Returns:
        Their names in it, sorted.

    Raises:
        ConfigurationError: There is something else than files, or a name is taken.
        OSError: The storage refused.
    """
    add_files(folder)
    found = []
    for path in walk(folder):
        name = path.relative_to(folder).as_posix()
        if trouble := _kind(path) or _of_name(name):
            raise _refused(f"{trouble}: {name}", name)
        if path.is_file():
            found.append(name)
    if is_root(folder, names_in(folder)):
        raise _refused("files that make it a root of checkpoints, which no later save could replace")
    return sorted(found)


def check_not_elsewhere(directory: AnyPath, names: list[str]) -> None:
    """Check that added files can be written where they go, into a directory that others have written to.

    Raises:
        ConfigurationError: A link or something else than a file is in the way.
    """
    if store_of(directory).local is None:
        return
    for name in names:
        place = directory / name
        if has_link(directory, name) or (place.exists() and not place.is_file()):
            raise _refused(f"a link or a special file that is there already: {name}", str(place))


def _kind(path: Path) -> str:
    """In words, what is there; empty for a file and a folder that can be read."""
    mode = path.lstat().st_mode
    if stat.S_ISDIR(mode):  # nobody could delete what is in a folder that cannot be changed
        return "" if os.access(path, os.R_OK | os.W_OK | os.X_OK) else "a folder that may not be read or changed"
    if stat.S_ISREG(mode):
        return "" if os.access(path, os.R_OK) else "a file that may not be read"
    return _KINDS.get(stat.S_IFMT(mode), "a special file")


def _of_name(name: str) -> str:
    """What is wrong with a name; empty where nothing is."""
    if is_part(name):
        return "a name of the checkpoint's own files"
    try:
        ExtraEntry(name=name, size=0, checksum="")
    except ValueError:
        return "a name that is too long or has a backslash"
    return ""


def _refused(found: str, key: str | None = None) -> ConfigurationError:
    return ConfigurationError(
        expected="add_files to add regular files and folders, none of them called like the checkpoint's own",
        found=found,
        remedy="Nothing was committed, the checkpoint before stands. Add copies of files instead of links, "
        "leave pipes, sockets and devices out, or choose another name.",
        key=key,
    )
