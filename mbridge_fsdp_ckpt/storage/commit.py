"""Commit: a checkpoint appears at its place complete, or not at all.

Two ways: `rename` on file systems, `marker` in object stores and wherever a rename is not atomic.  Only one rank calls
these functions on a checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from mbridge_fsdp_ckpt.storage import marker, rename
from mbridge_fsdp_ckpt.storage.content import Commit
from mbridge_fsdp_ckpt.storage.files import AnyPath

CommitMethod = Literal["auto", "rename", "marker"]
COMMIT_METHODS: tuple[CommitMethod, ...] = get_args(CommitMethod)


def begin(target: AnyPath, method: CommitMethod = "auto") -> Commit:
    """Begin a commit: by rename where the target is on a file system, unless the method says otherwise."""
    if isinstance(target, Path) and method != "marker":
        return rename.RenameCommit(target)
    return marker.MarkerCommit(target)


def recover(target: AnyPath) -> bool:
    """Undo a commit that died between its two renames; True where the old checkpoint was moved back."""
    return isinstance(target, Path) and rename.recover(target)


def leftovers(root: AnyPath) -> list[AnyPath]:
    """What dead saves and removals left behind."""
    return [*(rename.leftovers(root) if isinstance(root, Path) else []), *marker.leftovers(root)]


def remove_leftovers(root: AnyPath) -> list[AnyPath]:
    """Delete them; returns what was deleted."""
    return [path for path in leftovers(root) if _discard(path)]


def _discard(path: AnyPath) -> bool:
    if isinstance(path, Path) and path.is_dir():
        return rename.discard(path)
    path.unlink()
    return True


def remove(directory: AnyPath) -> None:
    """Delete a checkpoint so that no half of it can be taken for one."""
    if isinstance(directory, Path):
        rename.remove(directory)
    else:
        marker.remove(directory)
