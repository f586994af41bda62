"""What follows a save: the tracker, on rank 0 with the commit; then, where the training loop is, what others are told.

A save beside the training (`--async-save`) ends while Megatron-LM trains.  Its loop asks before every iteration and at
its end (`hosts.pending`); none of what is told then needs the other ranks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from megatron.training import checkpointing as stock
from megatron.training import one_logger_utils, wandb_utils
from megatron.training.utils import append_to_progress_log, is_last_rank, print_rank_0

from mbridge_fsdp_ckpt.hosts.root import RELEASE, TRACKER
from mbridge_fsdp_ckpt.storage.commit import removal
from mbridge_fsdp_ckpt.storage.commit.retention import remove_unless_read
from mbridge_fsdp_ckpt.storage.files import replace_file
from mbridge_fsdp_ckpt.storage.store import AnyPath, as_path

_log = logging.getLogger(__name__)


def publish(root: AnyPath, iteration: int, *, release: bool, interval: int | None) -> None:
    """Rank 0, after the commit: the tracker, and then Megatron-LM's rule for the checkpoint before.

    That one goes in the background.  Of any thread.
    """
    tracker = root / TRACKER
    before = tracker.read_bytes().decode(errors="replace").strip() if tracker.is_file() else ""
    replace_file(tracker, (RELEASE if release else str(iteration)).encode())
    if interval is not None and before.isdecimal() and int(before) not in (0, iteration) and int(before) % interval:
        old = as_path(stock.get_checkpoint_name(str(root), int(before), return_base_dir=True))
        removal.later(f"removing {old}", lambda: remove_unless_read(old))


@dataclass(frozen=True, slots=True)
class News:
    """That a checkpoint is there.

    Args:
        root: Of all checkpoints.
        directory: The checkpoint.
        iteration: Its iteration.
        metrics: What one_logger measured when the save began.
        beside: Whether it was saved beside the training.
        in_progress_log: Whether Megatron-LM's own log of the job's progress says when such a save has ended.
    """

    root: AnyPath
    directory: AnyPath
    iteration: int
    metrics: Any
    beside: bool
    in_progress_log: bool

    def tell(self) -> None:
        """Where the training loop is."""
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
            _log.warning("%s was saved, which a logger could not be told", self.directory, exc_info=True)
