"""Staging and commit: a checkpoint appears at its place complete, or not at all.

    save to DIR/iter_0000010
        DIR/.staging-iter_0000010-<token>/     written, flushed to disk and verified
        DIR/iter_0000010                       renamed; where it existed, the two are exchanged in one step

Only one rank calls this module's functions on a checkpoint.  The names begin with a dot: Megatron-Bridge takes every
`iter_*` below the root for a checkpoint.  Where the file system cannot exchange, the old directory steps aside as
`.replaced-iter_0000010-<token>` first; `recover` moves it back if the process dies between the two renames.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import uuid
from pathlib import Path

_STAGING, _REPLACED = ".staging-", ".replaced-"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def create_staging(target: Path) -> Path:
    """A fresh staging directory beside the target."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.parent / f"{_STAGING}{target.name}-{uuid.uuid4().hex[:12]}"
    staging.mkdir()
    return staging


def commit(staging: Path, target: Path) -> None:
    """Put a complete staging directory in the target's place and flush the change to disk."""
    sync_directory(staging)
    if not target.exists():
        staging.rename(target)
        sync_directory(target.parent)
        return
    if _exchange(staging, target):
        sync_directory(target.parent)
        shutil.rmtree(staging)  # now the old checkpoint
        return
    aside = target.parent / staging.name.replace(_STAGING, _REPLACED, 1)
    target.rename(aside)
    staging.rename(target)
    sync_directory(target.parent)
    shutil.rmtree(aside)


def recover(target: Path) -> bool:
    """Undo a commit that died between its two renames; True where the old checkpoint was moved back."""
    if target.exists() or not target.parent.is_dir():
        return False
    aside = sorted(path for path in target.parent.glob(f"{_REPLACED}*") if _target_name(path) == target.name)
    if not aside:
        return False
    try:
        aside[-1].rename(target)
    except FileNotFoundError:  # another rank was first
        return target.exists()
    sync_directory(target.parent)
    return True


def leftovers(root: Path) -> list[Path]:
    """Staging and replaced directories that dead saves left behind, replaced ones only where their target stands."""
    if not root.is_dir():
        return []
    stale = [path for path in root.glob(f"{_STAGING}*") if path.is_dir()]
    stale += [path for path in root.glob(f"{_REPLACED}*") if (root / _target_name(path)).exists()]
    return sorted(stale)


def _target_name(replaced: Path) -> str:
    return replaced.name.removeprefix(_REPLACED).rpartition("-")[0]


def remove_leftovers(root: Path) -> list[Path]:
    """Delete them; returns what was deleted."""
    stale = leftovers(root)
    for path in stale:
        shutil.rmtree(path, ignore_errors=False)
    return stale


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


def replace_file(path: Path, data: bytes) -> None:
    """Replace a small file in one step; readers see the old content or the new."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


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
