"""The directories and files that a user names on the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from mbridge_fsdp_ckpt.errors import NotACheckpointError

if TYPE_CHECKING:
    from mbridge_fsdp_ckpt.storage.store import AnyPath


def checkpoint_at(place: str) -> AnyPath:
    """The iteration directory: the place itself, or what the tracker there names.

    Raises:
        NotACheckpointError: There is neither.
        ManifestError: The tracker is no small file.
    """
    from mbridge_fsdp_ckpt.hosts.root import find_checkpoint
    from mbridge_fsdp_ckpt.storage.store import as_path

    return find_checkpoint(as_path(place))


def root_at(place: str) -> AnyPath:
    """The root of a run's checkpoints.

    Raises:
        typer.BadParameter: It is an iteration directory.
        NotACheckpointError: It is no directory.
    """
    from mbridge_fsdp_ckpt.storage.files import what_is_there
    from mbridge_fsdp_ckpt.storage.format.head import has_head
    from mbridge_fsdp_ckpt.storage.store import as_path

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


def draw_to(*drawings: tuple[str | None, Callable[[], bytes]]) -> list[str]:
    """Write pictures and pages to the files that a user named; returns their names.

    Args:
        drawings: The file, None where the user wants none, and what draws it.
    """
    from mbridge_fsdp_ckpt.storage.files import replace_file
    from mbridge_fsdp_ckpt.storage.store import as_path

    written = []
    for name, draw in drawings:
        if name is not None:
            replace_file(as_path(name), draw())
            written.append(name)
    return written
