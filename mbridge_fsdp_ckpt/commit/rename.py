# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Commit by rename, for file systems.

    save to DIR/iter_0000010
        DIR/.staging-iter_0000010-<token>/     written, flushed to disk and verified
        DIR/iter_0000010                       renamed; where it existed, the two are exchanged in one step
        DIR/.deleted-iter_0000010-<token>      what nobody needs any more, until it is deleted

The names begin with a dot: Megatron-Bridge takes every `iter_*` below the root for a checkpoint.  Where the file
system cannot exchange, the old directory steps aside as `.replaced-iter_0000010-<token>` first; `recover` moves it
back if the process dies between the two renames.  Whether a checkpoint is in place is a question for its metadata:
anybody may make the directory.

The time of a staging directory is its lease: ranks renew it while they write, and a save of another target takes it
away only if nobody has for an hour.  A save of the same target takes it away at once, for nothing else would free its
space soon after a crash; if two jobs save to one target, the one that began first fails, or is replaced.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from mbridge_fsdp_ckpt.commit import lease, removal
from mbridge_fsdp_ckpt.commit.added import added_by
from mbridge_fsdp_ckpt.commit.content import Content
from mbridge_fsdp_ckpt.commit.target import check_replaceable
from mbridge_fsdp_ckpt.errors import StorageError
from mbridge_fsdp_ckpt.format.metadata import has_metadata, has_readable_metadata
from mbridge_fsdp_ckpt.format.names import DELETED, MANIFEST_NAME, REPLACED, STAGING, beside, target_of, token
from mbridge_fsdp_ckpt.io.entries import ExtraEntry
from mbridge_fsdp_ckpt.io.file_system import TEMPORARY, sync_directory
from mbridge_fsdp_ckpt.io.files import file_checksum, size_of, write_file
from mbridge_fsdp_ckpt.io.store import AnyPath

_log = logging.getLogger(__name__)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_MOVED = errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST
_ATTEMPTS = 10


class RenameCommit:
    """See `content.Commit`: a staging directory beside the target, then one rename."""

    suffix = ""

    def __init__(self, target: Path) -> None:
        if target.exists() and not target.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target))
        self._target = target
        target.parent.mkdir(parents=True, exist_ok=True)
        self.directory = _beside(target, STAGING)
        self.directory.mkdir()

    def finish(self, content: Content) -> list[AnyPath]:
        """See `content.Commit`."""
        if content.write_view is not None:
            content.write_view(self.directory)
        if content.add_files is not None:
            self._add(content.add_files)
        content.progress()
        extra = tuple(self._flushed_extra(content))
        write_file(self.directory / MANIFEST_NAME, content.manifest(extra))
        content.progress()
        for folder, _, _ in self.directory.walk():
            if folder != self.directory:
                sync_directory(folder)
        check_replaceable(self._target)  # much may have come there while ranks wrote
        content.last_call()
        return put_in_place(self.directory, self._target)

    def _add(self, add_files: Callable[[Path], None]) -> None:
        """Into a folder of their own first: they can replace nothing that ranks have written."""
        folder = self.directory / f".added-{token()}"
        folder.mkdir()
        added_by(add_files, folder)
        for path in list(folder.iterdir()):
            path.rename(self.directory / path.name)
        folder.rmdir()

    def _flushed_extra(self, content: Content) -> list[ExtraEntry]:
        written = (folder / file for folder, _, files in self.directory.walk() for file in files)
        named = ((path.relative_to(self.directory).as_posix(), path) for path in written)
        found = []
        for name, path in sorted((name, path) for name, path in named if not content.flushed(name)):
            with path.open("rb") as file:
                os.fsync(file.fileno())
            checksum = file_checksum(path, content.progress)
            found.append(ExtraEntry(name=name, size=size_of(path), checksum=checksum))
        return found

    def abort(self) -> None:
        """See `content.Commit`."""
        if self.directory.exists():
            removal.delete_later([_condemned(self.directory)])


def put_in_place(staging: Path, target: Path) -> list[AnyPath]:
    """Put a complete staging directory in the target's place and flush the change to disk.

    A reader who moves the old one back between two renames, and a pruning that takes it away, move it under this
    save's hands: it begins anew.

    Returns:
        What nobody needs any more: the directory that was in place.

    Raises:
        OSError: The file system refused; what was in place is in place again.
        StorageError: It refused that, too.
    """
    sync_directory(staging)
    for _ in range(_ATTEMPTS - 1):
        try:
            return _put_in_place(staging, target)
        except OSError as error:
            if error.errno not in _MOVED or not staging.exists():
                raise
    return _put_in_place(staging, target)


def _put_in_place(staging: Path, target: Path) -> list[AnyPath]:
    if not target.exists():
        staging.rename(target)
        _sync_or_undo(target.parent, lambda: target.rename(staging))
        return []
    lease.renew(target)  # about to get a name that others take for a leftover
    if _exchange(staging, target):
        _sync_or_undo(target.parent, lambda: _exchange(staging, target))
        return [_condemned(staging)]
    aside = _beside(target, REPLACED if has_metadata(target) else DELETED)
    target.rename(aside)
    try:
        staging.rename(target)
    except OSError:
        _move_back(aside, target)
        raise
    _sync_or_undo(target.parent, lambda: (target.rename(staging), _move_back(aside, target)))
    return [_condemned(aside)]


def _sync_or_undo(directory: Path, undo: Callable[[], object]) -> None:
    try:
        sync_directory(directory)
    except OSError as error:
        try:
            undo()
        except OSError as stuck:
            raise StorageError(
                expected="a rename to be flushed to disk, or to be undone",
                found=f"{type(error).__name__}: {error}; then {type(stuck).__name__}: {stuck}",
                remedy="The older or the newer checkpoint is whole, which of them was not flushed: check the storage, "
                "run `mbridge_fsdp_ckpt repair`, and save again.",
                key=str(directory),
            ) from error
        raise


def _move_back(aside: Path, target: Path) -> bool:
    """Move a directory that stepped aside back; False where another was faster, or something else is in its place."""
    try:
        aside.rename(target)
    except OSError as error:
        if error.errno not in (*_MOVED, errno.ENOTDIR):
            raise
        return False
    return True


def _beside(target: Path, mark: str) -> Path:
    return target.parent / beside(mark, target.name)


def _condemned(path: Path) -> Path:
    """What nobody needs, under a name that says so; if it cannot be renamed, as it is."""
    condemned = _beside(path.parent / target_of(path.name), DELETED)
    try:
        path.rename(condemned)
    except OSError as error:
        _log.warning("could not rename %s, which is to be deleted: %s", path, error)
        return path
    return condemned


def put_aside(root: Path) -> dict[str, Path]:
    """By their targets' names, the directories that stepped aside below a root; of several for one, the newest."""
    ours = [path for path in root.glob(f"{REPLACED}*") if target_of(path.name)]
    return {target_of(path.name): path for path in sorted(ours, key=_modified)}


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # moved back meanwhile
        return 0.0


def recover(target: Path) -> bool:
    """Undo a commit that died between its two renames; True where the old checkpoint was moved back.

    An empty directory that somebody made in its place is replaced.  One with files in it, but without metadata, is left
    alone, and so are a link or a file; the old checkpoint stays aside then.
    """
    if not target.parent.is_dir() or has_metadata(target):
        return False
    aside = put_aside(target.parent).get(target.name)
    if aside is None:
        return False
    if not _move_back(aside, target):  # another rank was first
        return has_metadata(target)
    sync_directory(target.parent)
    return True


def leftovers(root: Path) -> list[AnyPath]:
    """What dead saves and removals left behind; replaced directories only where their target has metadata."""
    return [*_leftovers(root)]


def _leftovers(root: Path) -> list[Path]:
    return sorted(path for path in root.glob(".*") if is_leftover(path)) if root.is_dir() else []


def is_leftover(path: Path) -> bool:
    """Whether it is something that a dead save or removal left behind, whosever it is."""
    target = target_of(path.name)
    if not target:
        return TEMPORARY.fullmatch(path.name) is not None and path.is_file()
    is_old = path.name.startswith(REPLACED)
    return path.is_dir() and not path.is_symlink() and (not is_old or has_readable_metadata(path.parent / target))


def discard(leftover: Path) -> None:
    """Delete the directory of a leftover, renamed first: no half of an old checkpoint can be moved back."""
    condemned = _condemned(leftover)
    is_old = leftover.name.startswith(REPLACED) and condemned != leftover
    if is_old and not has_metadata(leftover.parent / target_of(leftover.name)):
        condemned.rename(leftover)
        return
    shutil.rmtree(condemned)


def condemn_leftovers(target: Path) -> list[AnyPath]:
    """Rename leftovers of this target, and those of others that nobody has touched for an hour; what is to be deleted.

    Who calls it is about to save this target.
    """
    found: list[AnyPath] = []
    for path in _leftovers(target.parent):
        if target_of(path.name) == target.name or lease.is_stale(path):
            if path.name.startswith((STAGING, REPLACED)):
                _log.warning("deleting %s, left by a save that died or by another save of %s", path, target)
                path = _condemned(path)
            found.append(path)
    return found


def remove(directory: Path, may_go: Callable[[Path], bool]) -> bool:
    """Delete a checkpoint, renamed first: no half of it can be taken for one.  See `methods.remove`.

    Until it may go it lies aside as in an overwriting commit: whoever looks for it after a death moves it back, and not
    what a dead save of the same target has left, which is older.
    """
    aside, goes = _beside(directory, REPLACED), False
    lease.renew(directory)
    directory.rename(aside)
    try:
        goes = may_go(aside)
    finally:
        if not goes and _move_back(aside, directory):
            sync_directory(directory.parent)
    if not goes and not (aside.is_dir() and has_metadata(directory)):  # else a save has put another one in its place
        return False
    condemned = _condemned(aside)
    sync_directory(directory.parent)
    shutil.rmtree(condemned)
    return True


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
