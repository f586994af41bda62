# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Where a converted checkpoint goes: an iteration directory that does not exist yet, and the tracker beside it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mbridge_fsdp_ckpt.commit import trackers
from mbridge_fsdp_ckpt.commit.methods import put_aside
from mbridge_fsdp_ckpt.commit.target import check_replaceable
from mbridge_fsdp_ckpt.errors import ConfigurationError, NotACheckpointError, brief
from mbridge_fsdp_ckpt.format.manifest import added_file
from mbridge_fsdp_ckpt.format.metadata import has_metadata
from mbridge_fsdp_ckpt.format.names import MAX_TRAIN_STATE_BYTES, TRAIN_STATE, iteration_name, iteration_of
from mbridge_fsdp_ckpt.io.files import is_plain_file, read_bounded
from mbridge_fsdp_ckpt.io.store import AnyPath, as_path, store_of


def open_destination(place: str, source: AnyPath, iteration: Any) -> AnyPath:
    """The directory to write.

    Args:
        place: What the user gave.
        source: The iteration directory that is read.
        iteration: Which iteration that says it is of; None where it does not say.

    Raises:
        ConfigurationError: It is there already, lies inside the source, or is named after another iteration.
    """
    target = as_path(place)
    check_free(target, source)
    inner, outer = store_of(target).local, store_of(source).local
    if inner is not None and outer is not None and inner.resolve().is_relative_to(outer.resolve()):
        raise ConfigurationError(
            expected="a destination outside of the checkpoint that is read",
            found=str(target),
            remedy="Give a directory elsewhere.",
        )
    named = iteration_of(target.name)
    if named is not None and isinstance(iteration, int) and named != iteration:
        raise ConfigurationError(
            expected=f"{iteration_name(iteration)}, since the checkpoint is of iteration {iteration}",
            found=target.name,
            remedy=f"Give {target.parent / iteration_name(iteration)}, or a name that is no iteration's.",
            key=str(target),
        )
    return target


def check_free(target: AnyPath, source: AnyPath) -> None:
    """Check that nothing is where the checkpoint is to go.

    Raises:
        ConfigurationError: Something is.
    """
    if not target.exists() and target.name not in put_aside(target.parent):
        check_replaceable(target)  # it may be a link that leads nowhere
        return
    is_root = target.is_dir() and not has_metadata(target)
    inside = target / (source.name if iteration_of(source.name) is not None else iteration_name(0))
    other = inside if is_root and not inside.exists() else target.with_name(f"{target.name}-converted")
    raise ConfigurationError(
        expected="a destination that does not exist yet",
        found="a directory" if target.is_dir() else "a file" if target.exists() else "what a save that died put aside",
        remedy=f"Give the iteration directory to be made, such as {other}; nothing is ever overwritten.",
        key=str(target),
    )


def remove_empty(folders: Iterable[AnyPath]) -> None:
    """Remove folders that were made on the way to the destination, and that have nothing in them."""
    for folder in folders:
        with suppress(FileNotFoundError):  # another rank was faster
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


@dataclass(frozen=True, slots=True)
class Published:
    """How a run finds the checkpoint.

    Args:
        tracker: Whether a tracker was written.
        resume: The settings that resume from it.
        note: Why no tracker was written; empty where one was.
    """

    tracker: bool
    resume: str
    note: str = ""


def publish(target: AnyPath, *, of_megatron_lm: bool) -> Published:
    """Let the tracker name a new checkpoint, where its root has none yet; an existing one is never changed.

    Args:
        target: The checkpoint.
        of_megatron_lm: Whether Megatron-LM saved it, whose options are others than Bridge's.
    """
    load, step = ("--load ", "--ckpt-step ") if of_megatron_lm else ("checkpoint.load=", "checkpoint.ckpt_step=")
    number, root = iteration_of(target.name), target.parent
    if number is None:
        return Published(False, f"{load}{target}")
    by_number = f"{load}{root} {step}{number}"
    try:
        named = trackers.meant(root)
        there = "" if named is None else f"names {named.name}"
    except NotACheckpointError as error:
        there = f"is not legible ({error.found})"
    if there:
        return Published(False, by_number, f"the tracker in {root} {there}, and was left as it is")
    state = added_file(target, TRAIN_STATE)
    try:
        trackers.publish(root, number, read_bounded(state, MAX_TRAIN_STATE_BYTES) if is_plain_file(state) else None)
    except OSError as error:  # the checkpoint is there, whole
        return Published(False, by_number, f"the tracker in {root} could not be written ({brief(error)})")
    return Published(True, f"{load}{root}")
