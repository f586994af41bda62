"""Commit: a checkpoint appears at its place complete, or not at all.

Two ways: `rename` on file systems, `marker` in object stores and wherever a rename is not atomic.  Only one rank calls
these functions on a checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from mbridge_fsdp_ckpt.settings import CommitMethod
from mbridge_fsdp_ckpt.storage.commit import marker, rename
from mbridge_fsdp_ckpt.storage.commit.content import Commit
from mbridge_fsdp_ckpt.storage.files import AnyPath


def begin(target: AnyPath, method: CommitMethod = "auto") -> Commit:
    """Begin a commit: by rename where the target is on a file system, unless the method says otherwise."""
    if isinstance(target, Path) and method != "marker":
        return rename.RenameCommit(target)
    return marker.MarkerCommit(target)


def is_put_aside(target: AnyPath) -> bool:
    """Whether `recover` would find an old checkpoint."""
    return isinstance(target, Path) and target.name in rename.put_aside(target.parent)


def condemn_leftovers(target: AnyPath, method: CommitMethod = "auto") -> list[AnyPath]:
    """What dead saves left that a save of this target may take away: its own, and others' that are an hour old.

    Directories get a name that says so.  Nothing is deleted yet.
    """
    found = rename.condemn_leftovers(target) if isinstance(target, Path) else []
    return found if isinstance(target, Path) and method != "marker" else [*found, *marker.dead_objects(target)]


def recover(target: AnyPath) -> bool:
    """Undo a commit that died between its two renames; True where the old checkpoint was moved back."""
    return isinstance(target, Path) and rename.recover(target)


def leftovers(root: AnyPath) -> list[AnyPath]:
    """What dead saves and removals left behind below a root, whosever it is."""
    return [*(rename.leftovers(root) if isinstance(root, Path) else []), *marker.leftovers(root)]


def remove(directory: AnyPath) -> None:
    """Delete a checkpoint so that no half of it can be taken for one."""
    if isinstance(directory, Path):
        rename.remove(directory)
    else:
        marker.remove(directory)
