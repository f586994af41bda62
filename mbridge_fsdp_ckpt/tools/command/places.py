# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The directories and files that a user names on the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from mbridge_fsdp_ckpt.errors import NotACheckpointError

if TYPE_CHECKING:
    from mbridge_fsdp_ckpt.io.store import AnyPath


def checkpoint_at(place: str) -> AnyPath:
    """The iteration directory: the place itself, or what the tracker there names.

    Raises:
        NotACheckpointError: There is neither.
        ManifestError: The tracker is no small file.
    """
    from mbridge_fsdp_ckpt.integrations.common.root import find_checkpoint
    from mbridge_fsdp_ckpt.io.store import as_path

    return find_checkpoint(as_path(place))


def root_at(place: str) -> AnyPath:
    """The root of a run's checkpoints.

    Raises:
        typer.BadParameter: It is an iteration directory.
        NotACheckpointError: It is no directory, or has nothing in it of what a root has, but something else.
    """
    from mbridge_fsdp_ckpt.format.metadata import has_metadata
    from mbridge_fsdp_ckpt.io.files import entries, what_is_there
    from mbridge_fsdp_ckpt.io.store import as_path

    root = as_path(place)
    if has_metadata(root):
        raise typer.BadParameter(f"{root} is an iteration directory: give the root that it lies in, {root.parent}")
    if not root.is_dir():
        raise NotACheckpointError(
            expected="the root of a run's checkpoints",
            found="a file" if root.exists() else what_is_there(root),
            remedy="Give the directory that holds iter_0000010.",
            key=str(root),
        )
    _check_is_root(root, {path.name for path in entries(root)})
    return root


def _check_is_root(root: AnyPath, names: set[str]) -> None:
    """A mistyped directory is an error, and not "nothing to do"; an empty one may be a run's that begins."""
    from mbridge_fsdp_ckpt.format.kinds import DESCRIPTIONS, kind_by_names
    from mbridge_fsdp_ckpt.format.names import RELEASE, STATE_TRACKER, TRACKER, iteration_of
    from mbridge_fsdp_ckpt.io.files import what_is_there

    of_verl = any(name.startswith("global_step_") for name in names)
    of_root = {name for name in names if iteration_of(name) is not None or name.startswith(".")}
    if not names or of_root or {RELEASE, STATE_TRACKER} & names or (TRACKER in names and not of_verl):
        return
    described = DESCRIPTIONS.get(kind_by_names(names))
    raise NotACheckpointError(
        expected="the root of a run's checkpoints",
        found=": ".join(filter(None, (described, what_is_there(root)))),
        remedy="VeRL looks after its root itself: trainer.max_actor_ckpt_to_keep."
        if of_verl
        else "Give the directory that holds iter_0000010.",
        key=str(root),
    )


def draw_to(name: str | None, draw: Callable[[], str]) -> list[str]:
    """Write a page to the file that a user named, if they did; returns the names of what was written."""
    from mbridge_fsdp_ckpt.io.files import replace_file
    from mbridge_fsdp_ckpt.io.store import as_path

    if name is None:
        return []
    replace_file(as_path(name), draw().encode())
    return [name]
