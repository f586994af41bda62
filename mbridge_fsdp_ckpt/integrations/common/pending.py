# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The asynchronous save of a framework's training, and what is still to follow it.

What a framework tells others of a checkpoint (loggers, callbacks) and what it does with old ones is the business of the
thread that trains: it looks, once a step, whether the save has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mbridge_fsdp_ckpt.saving.background.async_saves import async_saves
from mbridge_fsdp_ckpt.saving.background.handle import SaveHandle
from mbridge_fsdp_ckpt.saving.result import SaveResult


@dataclass(frozen=True, slots=True)
class Pending:
    """A save, and what follows it once it has ended well.

    Args:
        saving: Its handle.
        follow_up: Called in the thread that trains, with what the save cost.
        in_unison: Whether all ranks follow up at the same step: callbacks may wait for each other.
    """

    saving: SaveHandle
    follow_up: Callable[[SaveResult], None]
    in_unison: bool


_pending: Pending | None = None


def put(pending: Pending) -> None:
    """Remember a save that has just begun, once what follows the one before is done: that has ended."""
    global _pending
    settle()
    _pending = pending


def goes_on() -> bool:
    """Whether this rank would have to wait for a save."""
    return _pending is not None and not _pending.saving.done


def look(step: int = 0) -> None:
    """Follow up a save that has ended well.  What it failed with, the next one raises, or the end.

    Args:
        step: Of the training, the same on all ranks; of no use where none follows up in unison.
    """
    if _pending is not None:
        saving = _pending.saving
        if saving.ended_on_all(f"at step {step}") if _pending.in_unison else saving.done:
            settle()


def settle() -> None:
    """Wait until the save has ended, and follow it up; after one that failed nothing follows."""
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
        CheckpointError: It failed, and its error has not been raised yet: the same on every rank.
    """
    settle()
    async_saves().settle()
