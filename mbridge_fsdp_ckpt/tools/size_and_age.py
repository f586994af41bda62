# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A run's root as `prune` and `repair` see it: how large and how old things are."""

from __future__ import annotations

from collections.abc import Iterator

from mbridge_fsdp_ckpt.commit import lease
from mbridge_fsdp_ckpt.io.files import everything_in, size_of
from mbridge_fsdp_ckpt.io.store import AnyPath, is_local


def files_in(path: AnyPath) -> Iterator[AnyPath]:
    """A file, or all files below a directory."""
    if not path.is_dir():
        yield path
        return
    yield from (inner for inner in everything_in(path) if inner.is_file())


def bytes_in(path: AnyPath) -> int:
    """Bytes of a file, or below a directory."""
    return sum(size_of(file) for file in files_in(path))


def is_young(path: AnyPath) -> bool:
    """Whether anything in it was touched within the last hour, or may have been: somebody may be writing it."""
    touched = [path] if is_local(path) else []  # object stores have no directories that could be touched
    now = lease.now(path.parent)
    return any(lease.is_fresh(place, now) for place in (*touched, *files_in(path)))
