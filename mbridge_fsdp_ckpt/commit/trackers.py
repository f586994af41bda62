# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The files in a run's root that say which checkpoint is meant: read and written here and nowhere else.

    latest_train_state.pt                 Bridge's: the newest checkpoint's train state.  Bridge writes it first
    latest_checkpointed_iteration.txt     Megatron's: an iteration's number, or `release`.  Bridge writes it last

Bridge's counts where it is there, as in Bridge: a job that died between the two leaves it the newer one.  Where it is
the older one, another loop has gone on in the root, or somebody edited the other: nobody can tell which is meant.
Of two checkpoints of which one is gone, the other one is meant: somebody has deleted what came after it.

A tracker may be a link to a file in the root.  One that leads out is refused: whoever made the checkpoint may have made
it, too, and no file outside is opened for them (docs/soak.md, "Forged checkpoints").
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mbridge_fsdp_ckpt.commit.methods import put_aside
from mbridge_fsdp_ckpt.errors import NotACheckpointError, brief
from mbridge_fsdp_ckpt.format.metadata import has_metadata
from mbridge_fsdp_ckpt.format.names import RELEASE, STATE_TRACKER, TRACKER, iteration_name
from mbridge_fsdp_ckpt.io.files import opened, replace_file, size_of
from mbridge_fsdp_ckpt.io.store import AnyPath, store_of

_MAX_BYTES = {TRACKER: 1 << 12, STATE_TRACKER: 1 << 20}
_MAX_DIGITS = 18
_SHOWN = 100  # characters that an error quotes


@dataclass(frozen=True, slots=True)
class Named:
    """A checkpoint that a tracker names; it need not be there.

    Args:
        tracker: The file.
        number: The iteration; None for a release.
    """

    tracker: AnyPath
    number: int | None

    @property
    def name(self) -> str:
        """What the checkpoint's directory is called."""
        return directory_name(self.number)


def directory_name(number: int | None) -> str:
    """What the directory of an iteration is called, or that of a release (None)."""
    return RELEASE if number is None else iteration_name(number)


def content(number: int | None) -> bytes:
    """What Megatron's tracker holds where it names an iteration, or a release (None)."""
    return (RELEASE if number is None else str(number)).encode()


def meant(root: AnyPath) -> Named | None:
    """The checkpoint that a root's trackers mean; None where there is no tracker.

    Raises:
        NotACheckpointError: A tracker is not legible, or the two contradict each other.
    """
    by_bridge, by_megatron = read(root / STATE_TRACKER), read(root / TRACKER)
    if by_bridge is None or by_megatron is None or by_bridge.number == by_megatron.number:
        return by_bridge or by_megatron
    there = [named for named in (by_bridge, by_megatron) if _is_there(root / named.name)]
    if len(there) == 1:
        return there[0]
    if by_bridge.number is None or by_megatron.number is None or by_bridge.number < by_megatron.number:
        raise NotACheckpointError(
            expected=f"{STATE_TRACKER} to name what {TRACKER} names, or a newer iteration",
            found=f"{by_bridge.name}, and {by_megatron.name} in {TRACKER}",
            remedy="Another training loop has saved to this root, or somebody edited a tracker. Choose an iteration, "
            "or delete the tracker that is wrong.",
            key=str(by_bridge.tracker),
        )
    return by_bridge


def _is_there(directory: AnyPath) -> bool:
    """Whether a checkpoint is there, or lies aside and will be moved back."""
    return has_metadata(directory) or directory.name in put_aside(directory.parent)


def present(root: AnyPath) -> list[AnyPath]:
    """The trackers that a root has, legible or not."""
    return [path for path in (root / STATE_TRACKER, root / TRACKER) if path.exists() or store_of(path).is_link()]


def every_named(root: AnyPath) -> dict[int | None, str]:
    """All that some tracker of a root names: iterations, None for a release, each with the tracker's name.

    Raises:
        NotACheckpointError: A tracker is not legible: what it names is not known.
    """
    found = (read(root / tracker) for tracker in (STATE_TRACKER, TRACKER))
    return {named.number: named.tracker.name for named in found if named is not None}


def publish(root: AnyPath, number: int | None, train_state: bytes | None = None) -> None:
    """Let the trackers of a root name a checkpoint, each in one step.

    At each moment the two mean what was meant before, or the new one: one that would contradict the other goes first.

    Args:
        root: The root of a run's checkpoints.
        number: The iteration; None for a release.
        train_state: What Bridge's tracker holds; None where it is not known.  Then one that is there goes, for it
            belongs to another checkpoint.
    """
    text, state = root / TRACKER, root / STATE_TRACKER
    named = content(number)
    if train_state is None:
        if text.is_file():
            store_of(state).remove()
        replace_file(text, named)
        store_of(state).remove()
    elif not state.is_file():
        replace_file(text, named)
        replace_file(state, train_state)
    else:
        if not _is_at_most(text, number):
            store_of(text).remove()
        replace_file(state, train_state)
        replace_file(text, named)


def _is_at_most(text: AnyPath, number: int | None) -> bool:
    """Whether Megatron's tracker may stand beside Bridge's of this number: see `meant`."""
    try:
        named = read(text)
    except NotACheckpointError:
        return False
    return named is None or (named.number is not None and number is not None and named.number <= number)


def read(tracker: AnyPath) -> Named | None:
    """What one tracker names; None where it is not there.

    Raises:
        NotACheckpointError: It is not legible.
    """
    local, is_link, place = store_of(tracker).local, store_of(tracker).is_link(), tracker
    if local is not None:
        leads = Path(os.path.realpath(local))  # `resolve` raises where links go in a cycle
        if is_link and not leads.is_relative_to(os.path.realpath(local.parent)):
            raise _illegible(tracker, "which leads out of the root")
        place = leads
    if not tracker.is_file():
        if not is_link and not tracker.exists():
            return None
        kind = "a directory" if tracker.is_dir() else "neither a file nor a directory"
        raise _illegible(tracker, kind if tracker.exists() else "which does not exist")
    try:
        size = size_of(tracker)
        if size > _MAX_BYTES[tracker.name]:
            raise _illegible(tracker, f"a file of {size} bytes")
        with opened(place) as file:
            data = file.read(size)
    except FileNotFoundError:  # removed meanwhile: see `publish`
        return None
    return Named(tracker, _step_of(tracker, data) if tracker.name == STATE_TRACKER else _number_in(tracker, data))


def _number_in(tracker: AnyPath, data: bytes) -> int | None:
    text = data.decode(errors="replace").strip()
    if text == RELEASE:
        return None
    if not (text.isascii() and text.isdecimal()):
        raise _illegible(tracker, repr(text[:_SHOWN]))
    if len(text) > _MAX_DIGITS:
        raise _illegible(tracker, f"a number of {len(text)} digits")
    return int(text)


def _step_of(tracker: AnyPath, data: bytes) -> int:
    from mbridge_fsdp_ckpt.dcp.unpickler import load_record  # DCP, which a checkpoint process does without

    try:
        step = load_record(np.frombuffer(data, dtype=np.uint8))["step"]
        exact = isinstance(step, int) or not (step.is_floating_point() or step.is_complex())
        if not exact or int(step) < 0:
            raise ValueError("its step is no iteration's number")
    except Exception as error:  # a pickle stream can raise anything
        raise _illegible(tracker, f"no train state of Bridge's: {brief(error)}") from error
    return int(step)


def _illegible(tracker: AnyPath, found: str) -> NotACheckpointError:
    """The error for a tracker that names nothing."""
    local = store_of(tracker).local
    if local is not None and local.is_symlink():
        found = f"a link to {local.readlink()}, {found}"
    return NotACheckpointError(
        expected=f"{tracker.name} to be a small file that names an iteration",
        found=found,
        remedy=f"Choose an iteration, or rebuild the tracker: mbridge_fsdp_ckpt repair {tracker.parent}",
        key=str(tracker),
    )
