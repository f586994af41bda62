# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""VeRL's asynchronous saves (`checkpoint.async_save`): VeRL's own bookkeeping follows the commit.

VeRL writes its manifest, uploads, sets the tracker and removes old checkpoints in one function.  Once its export is
written, it puts that function into a queue that nothing in VeRL serves.  Here rank 0 calls it right after the commit,
in another thread.  The other ranks, which only remove old directories of their own host in it, call it when the next
save begins.

Ray kills its actors as soon as the driver has ended, so the last save of a run is waited for.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from mbridge_fsdp_ckpt import checkpoint
from mbridge_fsdp_ckpt.errors import SaveAbandonedError
from mbridge_fsdp_ckpt.saving.background.channel import slices

_log = logging.getLogger(__name__)
_ACTOR = "actor"


class Following:
    """VeRL's bookkeeping for one save, called once the checkpoint is committed.

    Args:
        limit: Seconds that VeRL may take after the commit until it hands its function over.
    """

    def __init__(self, limit: float) -> None:
        self._limit, self._handed_over = limit, threading.Event()
        self._finalize: Callable[[], None] | None = None
        self.saving: checkpoint.SaveHandle | None = None
        """The save, once it has begun."""

    def hand_over(self, finalize: Callable[[], None] | None) -> bool:
        """Take VeRL's function, or None if its export failed; returns False if one was handed over before."""
        if self._handed_over.is_set():
            return False
        self._finalize = finalize
        self._handed_over.set()
        return True

    def after_commit(self) -> None:
        """Wait for VeRL's function and call it, on rank 0, in another thread.

        Raises:
            SaveAbandonedError: VeRL's export failed, or takes too long.
        """
        has_come = any(self._handed_over.wait(pause) for pause in slices(self._limit))
        if self._finalize is None:
            raise SaveAbandonedError(
                expected="VeRL's export of the same step beside the sharded checkpoint",
                found="an export that failed"
                if has_come
                else f"no export within {self._limit:g} s of the commit (storage_limit)",
                remedy="See the error of the export. VeRL's tracker names the previous checkpoint.",
            )
        self._finalize()

    def call_on_other_rank(self) -> None:
        """Call VeRL's function on a rank other than 0, in the thread that trains, if the save was committed."""
        if self._finalize is not None and self.saving is not None and self.saving.done and self.saving.error is None:
            finalize, self._finalize = self._finalize, None
            finalize()


_following_of: WeakKeyDictionary[Any, Following] = WeakKeyDictionary()


def remember(manager: Any, following: Following, saving: checkpoint.SaveHandle) -> None:
    """Remember a manager's save that has just begun, and do the bookkeeping of its previous one, which has ended."""
    following.saving = saving
    previous = _following_of.get(manager)
    if previous is not None and manager.rank != 0:
        previous.call_on_other_rank()
    _following_of[manager] = following


def hand_over(manager: Any, finalize: Callable[[], None] | None) -> bool:
    """Give VeRL's function to the save that has just begun; returns False if there is no such save."""
    following = _following_of.get(manager)
    return following is not None and following.hand_over(finalize)


def keep_to_actors(manager: Any, local_path: str) -> None:
    """Switch asynchronous saves off for managers other than those of actors under PPO's trainers.

    The SFT trainer sets its tracker as soon as a save has returned.  A critic would set the same tracker as its actor,
    which need not be committed by then.

    Args:
        manager: VeRL's `MegatronCheckpointManager`.
        local_path: PPO's trainers save in `.../global_step_N/actor` and `critic`, the SFT trainer in `global_step_N`.
    """
    if manager.checkpoint_config.async_save and Path(local_path).name != _ACTOR:
        manager.checkpoint_config = dataclasses.replace(manager.checkpoint_config, async_save=False)
        if manager.rank == 0:
            _log.warning("checkpoint.async_save=True is for actors: saves to %s stay synchronous", local_path)


def is_last(engine: Any, step: int) -> bool:
    """Whether VeRL's driver may save no later step; True also if it does not say how long it trains."""
    steps = engine.optimizer_config.total_training_steps
    return bool(steps <= 0 or max(step, getattr(engine.lr_scheduler, "num_steps", 0)) >= steps)


def finish(manager: Any) -> None:
    """Wait for a manager's save, and do its bookkeeping.

    Raises:
        CheckpointError: The save failed.  The same on every rank.
    """
    checkpoint.finish_saves()
    following = _following_of.get(manager)
    if following is not None and manager.rank != 0:
        following.call_on_other_rank()
