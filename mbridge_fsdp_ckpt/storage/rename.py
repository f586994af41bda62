"""Commit by rename, for file systems.

    save to DIR/iter_0000010
        DIR/.staging-iter_0000010-<token>/     written, flushed to disk and verified
        DIR/iter_0000010                       renamed; where it existed, the two are exchanged in one step

The names begin with a dot: Megatron-Bridge takes every `iter_*` below the root for a checkpoint.  Where the file
system cannot exchange, the old directory steps aside as `.replaced-iter_0000010-<token>` first; `recover` moves it
back if the process dies between the two renames.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from mbridge_fsdp_ckpt.storage.content import Content
from mbridge_fsdp_ckpt.storage.files import TEMPORARY, AnyPath, file_checksum, size_of, sync_directory, write_file
from mbridge_fsdp_ckpt.storage.manifest import MANIFEST_NAME
from mbridge_fsdp_ckpt.storage.schema import ExtraEntry

STAGING, REPLACED, DELETED = ".staging-", ".replaced-", ".deleted-"
_log = logging.getLogger(__name__)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class RenameCommit:
    """See `content.Commit`: a staging directory beside the target, then one rename."""

    suffix = ""

    def __init__(self, target: Path) -> None:
        self._target = target
        target.parent.mkdir(parents=True, exist_ok=True)
        self.directory = target.parent / f"{STAGING}{target.name}-{uuid.uuid4().hex[:12]}"
        self.directory.mkdir()

    def finish(self, content: Content) -> None:
        """See `content.Commit`."""
        if content.write_view is not None:
            content.write_view(self.directory)
        if content.add_files is not None:
            content.add_files(self.directory)
        content.progress()
        extra = tuple(self._flushed_extra(content))
        write_file(self.directory / MANIFEST_NAME, content.manifest(extra))
        content.progress()
        for folder in (path for path in self.directory.rglob("*") if path.is_dir()):
            sync_directory(folder)
        content.last_call()
        put_in_place(self.directory, self._target)

    def _flushed_extra(self, content: Content) -> list[ExtraEntry]:
        found = []
        for path in sorted(self.directory.rglob("*")):
            name = path.relative_to(self.directory).as_posix()
            if path.is_file() and name not in content.flushed:
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                checksum = file_checksum(path, content.progress)
                found.append(ExtraEntry(name=name, size=size_of(path), checksum=checksum))
        return found

    def abort(self) -> None:
        """See `content.Commit`."""
        if self.directory.exists():
            discard(self.directory)


def put_in_place(staging: Path, target: Path) -> None:
    """Put a complete staging directory in the target's place and flush the change to disk.

    Raises:
        OSError: The file system refused; what was in place is in place again.
    """
    sync_directory(staging)
    if not target.exists():
        staging.rename(target)
        _sync_or_undo(target.parent, lambda: target.rename(staging))
        return
    if _exchange(staging, target):
        _sync_or_undo(target.parent, lambda: _exchange(staging, target))
        discard(staging)  # now the old checkpoint
        return
    aside = target.parent / staging.name.replace(STAGING, REPLACED, 1)
    target.rename(aside)
    try:
        staging.rename(target)
    except OSError:
        aside.rename(target)
        raise
    sync_directory(target.parent)
    discard(aside)


def _sync_or_undo(directory: Path, undo: Callable[[], object]) -> None:
    try:
        sync_directory(directory)
    except OSError:
        undo()
        raise


def discard(path: Path) -> bool:
    """Delete a directory that nobody needs; one that cannot be deleted is left to the next save."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        _log.warning("could not remove %s: %s", path, error)
    return not path.exists()


def put_aside(root: Path) -> dict[str, Path]:
    """By their targets' names, the directories that stepped aside below a root; of several for one, the newest."""
    return {_target_name(path): path for path in sorted(root.glob(f"{REPLACED}*"), key=_modified)}


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # moved back meanwhile
        return 0.0


def recover(target: Path) -> bool:
    """Undo a commit that died between its two renames; True where the old checkpoint was moved back."""
    if target.exists() or not target.parent.is_dir():
        return False
    try:
        aside = put_aside(target.parent).get(target.name)
        if aside is None:
            return False
        aside.rename(target)
    except FileNotFoundError:  # another rank was first
        return target.exists()
    sync_directory(target.parent)
    return True


def leftovers(root: Path) -> list[AnyPath]:
    """What dead saves and removals left behind; replaced directories only where their target stands."""
    if not root.is_dir():
        return []
    stale = [path for mark in (STAGING, DELETED) for path in root.glob(f"{mark}*") if path.is_dir()]
    stale += [path for path in root.glob(f"{REPLACED}*") if (root / _target_name(path)).exists()]
    stale += [path for path in root.glob(".*") if TEMPORARY.fullmatch(path.name) and path.is_file()]
    return [*sorted(stale)]


def remove(directory: Path) -> None:
    """Delete a checkpoint, renamed first: no half of it can be taken for one."""
    doomed = directory.parent / f"{DELETED}{directory.name}-{uuid.uuid4().hex[:12]}"
    directory.rename(doomed)
    sync_directory(directory.parent)
    shutil.rmtree(doomed)


def _target_name(replaced: Path) -> str:
    return replaced.name.removeprefix(REPLACED).rpartition("-")[0]


def _exchange(one: Path, other: Path) -> bool:
    """renameat2(RENAME_EXCHANGE); False where the kernel or the file system has none."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    result = libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))
