# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The asynchronous save of a framework's training, and what the framework does once it has ended.

Loggers and callbacks are called, and old checkpoints removed, in the thread that trains.  Once a step it checks whether
the save has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mbridge_fsdp_ckpt.saving.background.async_saves import async_saves
from mbridge_fsdp_ckpt.saving.background.handle import SaveHandle
from mbridge_fsdp_ckpt.saving.result import SaveResult


@dataclass(frozen=True, slots=True)
class Pending:
    """A save, and the function to call once it is committed.

    Args:
        saving: The handle of the save.
        follow_up: Called in the thread that trains, with the result of the save.
        in_unison: Whether all ranks call `follow_up` at the same step, because callbacks may wait for each other.
    """

    saving: SaveHandle
    follow_up: Callable[[SaveResult], None]
    in_unison: bool


_pending: Pending | None = None


def put(pending: Pending) -> None:
    """Remember a save that has just begun.  The previous save has ended, and is followed up first."""
    global _pending
    settle()
    _pending = pending


def goes_on() -> bool:
    """Whether a save is in progress on this rank."""
    return _pending is not None and not _pending.saving.done


def look(step: int = 0) -> None:
    """Follow up the save if it has ended.  The next save, or `finish`, raises the error of one that failed.

    Args:
        step: The training step, the same on all ranks; used only if ranks follow up in unison.
    """
    if _pending is not None:
        saving = _pending.saving
        if saving.ended_on_all(f"at step {step}") if _pending.in_unison else saving.done:
            settle()


def settle() -> None:
    """Wait until the save has ended, and follow it up unless it failed."""
    global _pending
    pending = _pending
    if pending is None:
        return
    pending.saving.wait()  # where a signal ends the wait, it is still to be followed up
    _pending = None
    if pending.saving.error is None:
        pending.follow_up(pending.saving.result())


def finish() -> None:
    """Wait until the save has ended, and follow it up.

    Raises:
        CheckpointError: The save failed, and its error has not been raised yet.  The same on every rank.
    """
    settle()
    async_saves().settle()
