"""A run's root as `prune` and `repair` see it: its tracker, and how large and how old things are."""

from __future__ import annotations

import time
from collections.abc import Iterator

import typer

from mbridge_fsdp_ckpt.errors import NotACheckpointError
from mbridge_fsdp_ckpt.storage.commit.lease import STALE_S
from mbridge_fsdp_ckpt.storage.files import size_of, what_is_there
from mbridge_fsdp_ckpt.storage.format.head import has_head
from mbridge_fsdp_ckpt.storage.store import AnyPath, as_path, is_local


def open_root(place: str) -> AnyPath:
    """The root.

    Raises:
        typer.BadParameter: It is an iteration directory.
        NotACheckpointError: It is no directory.
    """
    root = as_path(place)
    if has_head(root):
        raise typer.BadParameter(f"{root} is an iteration directory: give the root that it lies in, {root.parent}")
    if not root.is_dir():
        raise NotACheckpointError(
            expected="the root of a run's checkpoints",
            found="a file" if root.exists() else what_is_there(root),
            remedy="Give the directory that holds iter_0000010.",
            key=str(root),
        )
    return root


def files_in(path: AnyPath) -> Iterator[AnyPath]:
    """A file, or all files below a directory."""
    if not path.is_dir():
        yield path
        return
    yield from (inner for inner in path.rglob("*") if inner.is_file())


def bytes_in(path: AnyPath) -> int:
    """Bytes of a file, or below a directory."""
    return sum(size_of(file) for file in files_in(path))


def is_young(path: AnyPath) -> bool:
    """Whether anything in it was touched within the last hour, or may have been: somebody may be writing it."""
    touched = [path] if is_local(path) else []  # object stores have no directories that could be touched
    return any(_is_fresh(place.stat().st_mtime) for place in (*touched, *files_in(path)))


def _is_fresh(modified: float) -> bool:
    return modified == 0 or time.time() - modified < STALE_S  # 0: a store that does not tell
