"""The save that goes on beside a Bridge run's training, and what is still to follow it.

Loggers, callbacks and old checkpoints are the business of the thread that trains: it looks, once a step, whether the
save has ended (`CheckpointManager.finalize_async_saves`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mbridge_fsdp_ckpt import checkpoint
from mbridge_fsdp_ckpt.checkpoint import Saved, Saving
from mbridge_fsdp_ckpt.saving.beside.trainer import trainer


@dataclass(frozen=True, slots=True)
class Pending:
    """A save, and what follows it once it has ended well.

    Args:
        saving: Its handle.
        follow_up: Called in the thread that trains, with what the save cost.
        in_unison: Whether all ranks follow up at the same step: callbacks may wait for each other.
    """

    saving: Saving
    follow_up: Callable[[Saved], None]
    in_unison: bool

    @property
    def has_ended(self) -> bool:
        """Whether it is time to follow up."""
        return self.saving.ended_on_all() if self.in_unison else self.saving.done


_pending: Pending | None = None


def put(pending: Pending) -> None:
    """Remember a save that has just begun, once what follows the one before is done: that has ended."""
    global _pending
    settle()
    _pending = pending


def settle() -> None:
    """Wait until the save has ended, and follow it up; after one that failed nothing follows."""
    global _pending
    pending, _pending = _pending, None
    if pending is None:
        return
    pending.saving.wait()
    if pending.saving.error is None:
        pending.follow_up(pending.saving.result())


def finalize(*, blocking: bool, terminate: bool) -> None:
    """What Bridge asks for after each step, and at the end.

    Args:
        blocking: Whether to wait for the save, not only to look.
        terminate: Whether it was the last one: the process that writes ends, and its memory is given back.

    Raises:
        CheckpointError: The save failed, and its error has not been raised yet: the same on every rank.  Not by a look.
    """
    if not (blocking or terminate):
        if _pending is not None and _pending.has_ended:
            settle()
        return
    try:
        settle()
        checkpoint.finish_saves()
    finally:
        if terminate:
            trainer().stop()
