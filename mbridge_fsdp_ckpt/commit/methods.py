# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Commit: a checkpoint appears at its place complete, or not at all.

Two ways: `rename` on file systems, `marker` in object stores and wherever a rename is not atomic.  Only one rank calls
these functions on a checkpoint.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from mbridge_fsdp_ckpt.commit import marker, rename
from mbridge_fsdp_ckpt.commit.content import Commit
from mbridge_fsdp_ckpt.format.metadata import metadata_of
from mbridge_fsdp_ckpt.io.store import AnyPath, store_of
from mbridge_fsdp_ckpt.settings import CommitMethod


def begin(target: AnyPath, method: CommitMethod = "auto") -> Commit:
    """Begin a commit: by rename where the target is on a file system, unless the method says otherwise."""
    local = store_of(target).local
    return marker.MarkerCommit(target) if local is None or method == "marker" else rename.RenameCommit(local)


def put_aside(root: AnyPath) -> dict[str, AnyPath]:
    """By their targets' names, the old checkpoints below a root that `recover` would find."""
    local = store_of(root).local
    return {} if local is None else {**rename.put_aside(local)}


def condemn_leftovers(target: AnyPath, method: CommitMethod = "auto") -> list[AnyPath]:
    """What dead saves left that a save of this target may take away: its own, and others' that are an hour old.

    Directories get a name that says so.  Nothing is deleted yet.
    """
    local = store_of(target).local
    found = [] if local is None else rename.condemn_leftovers(local)
    return [*found, *marker.condemned(target)] if local is None or method == "marker" else found


def recover(target: AnyPath) -> bool:
    """Undo a commit that died between its two renames; True where the old checkpoint was moved back."""
    local = store_of(target).local
    return local is not None and rename.recover(local)


def leftovers(root: AnyPath) -> list[AnyPath]:
    """What dead saves and removals left behind below a root, whosever it is."""
    local = store_of(root).local
    return [*([] if local is None else rename.leftovers(local)), *marker.leftovers(root)]


def is_leftover(place: AnyPath) -> bool:
    """Whether an entry of a root of a file system is something that a dead save or removal left behind."""
    local = store_of(place).local
    return local is not None and rename.is_leftover(local)


def discard(leftover: AnyPath) -> None:
    """Delete one of a file system; what has become the last checkpoint of its name meanwhile stays."""
    local = store_of(leftover).local
    if local is not None and local.is_dir():
        rename.discard(local)
    else:
        store_of(leftover).remove()


def identity(directory: AnyPath) -> object:
    """What tells a checkpoint from another that takes its place: the identity of its metadata.

    Raises:
        FileNotFoundError: It is gone.
    """
    metadata = metadata_of(directory)
    if metadata is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(directory))
    return store_of(metadata).identity()


def remove(directory: AnyPath, may_go: Callable[[AnyPath], bool] = lambda _: True) -> bool:
    """Delete a checkpoint so that no half of it can be taken for one; whether it is gone.

    Args:
        directory: The checkpoint.
        may_go: Asked once more: on a file system when nobody can reach it any more, and put back where it may not.
    """
    local = store_of(directory).local
    if local is None:
        return marker.remove(directory, may_go)
    return rename.remove(local, may_go)
