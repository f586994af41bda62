# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What follows a save: the tracker, on rank 0 with the commit; then, in the training loop, logs and loggers.

An asynchronous save (`--async-save`) ends while Megatron-LM trains.  Its loop asks before every iteration and at
its end (`integrations.common.pending`); nothing of it needs the other ranks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from megatron.training import checkpointing as stock
from megatron.training import one_logger_utils, wandb_utils
from megatron.training.utils import append_to_progress_log, is_last_rank, print_rank_0

from mbridge_fsdp_ckpt.commit import trackers
from mbridge_fsdp_ckpt.commit.retention import remove_later
from mbridge_fsdp_ckpt.errors import NotACheckpointError
from mbridge_fsdp_ckpt.format.names import TRACKER
from mbridge_fsdp_ckpt.io.store import AnyPath, as_path

_log = logging.getLogger(__name__)


def publish(root: AnyPath, iteration: int, *, release: bool, interval: int | None, chosen: int | None) -> None:
    """Rank 0, after the commit: the tracker, and then Megatron-LM's rule for the checkpoint before.

    That one goes in the background.  Of any thread.

    Args:
        root: The root of the run's checkpoints.
        iteration: The iteration that was saved.
        release: Whether it was saved as a release.
        interval: The checkpoint before goes, unless its iteration is a multiple of this; None lets it stay.
        chosen: An iteration that stays: a restart would begin from it again (--ckpt-step).
    """
    before = _before(root) if interval is not None else None
    trackers.publish(root, None if release else iteration)
    if interval is not None and before not in (None, 0, iteration, chosen) and before % interval:
        old = as_path(stock.get_checkpoint_name(str(root), before, return_base_dir=True))
        remove_later(old)


def _before(root: AnyPath) -> int | None:
    """The iteration that was saved last; None where that is unknown."""
    try:
        named = trackers.meant(root)
    except NotACheckpointError:
        return None
    return None if named is None else named.number


@dataclass(frozen=True, slots=True)
class News:
    """The reports that follow a committed checkpoint.

    Args:
        root: The root of the run's checkpoints.
        directory: The checkpoint.
        iteration: The checkpoint's iteration.
        metrics: The metrics that one_logger returned when the save began.
        beside: Whether it was saved asynchronously.
        in_progress_log: Whether Megatron-LM's own log of the job's progress says when such a save has ended.
    """

    root: AnyPath
    directory: AnyPath
    iteration: int
    metrics: Any
    beside: bool
    in_progress_log: bool

    def tell(self) -> None:
        """Print and log that the checkpoint was saved, in the thread of the training loop."""
        print_rank_0(f"  successfully saved checkpoint from iteration {self.iteration:7d} to {self.root}")
        if self.beside and self.in_progress_log:
            said = f"Saved async checkpoint\tIteration: {self.iteration}"
            append_to_progress_log(str(self.root), said, barrier=False)
        if is_last_rank():
            self._tell_loggers()

    def _tell_loggers(self) -> None:
        """On the last rank alone: the checkpoint is there, and the other ranks go on, whatever a logger says."""
        try:
            one_logger_utils.on_save_checkpoint_success(self.metrics, self.beside)
            wandb_utils.on_save_checkpoint_success(
                str(self.directory), str(self.root / TRACKER), str(self.root), self.iteration
            )
        except Exception:
            _log.warning("%s was saved, but a logger raised", self.directory, exc_info=True)
