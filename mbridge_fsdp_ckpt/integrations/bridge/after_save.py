# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What Bridge does around a save besides tensors and files: its dataloader, loggers, callbacks, old checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.bridge.training import checkpointing as stock
from megatron.bridge.training.callbacks import CallbackContext, should_fire
from megatron.bridge.training.utils import comet_utils, mlflow_utils, wandb_utils
from megatron.bridge.utils.common_utils import get_rank_safe, is_last_rank, print_rank_0

from mbridge_fsdp_ckpt.commit.retention import prune_later
from mbridge_fsdp_ckpt.integrations.bridge.differences import dataloader_directory, recovery_directories
from mbridge_fsdp_ckpt.integrations.bridge.scalars import log_scalars
from mbridge_fsdp_ckpt.io.store import AnyPath, as_path
from mbridge_fsdp_ckpt.saving.result import SaveResult


def root_directory(checkpoint_config: Any, *, non_persistent: bool) -> AnyPath:
    """Where iteration directories go."""
    if not non_persistent:
        return as_path(checkpoint_config.save)
    first, *_ = recovery_directories(checkpoint_config.save, checkpoint_config)
    return as_path(first)


def save_dataloader_state(state: Any, model: list[Any], iterator: Any, pg_collection: Any) -> None:
    """Megatron-Energon's position, beside the checkpoints, by Bridge's rule."""
    path = getattr(state.cfg.dataset, "dataloader_save", None)
    below = dataloader_directory()
    has_position = hasattr(getattr(iterator, "iterable", None), "save_state")
    if path is None and below is not None and state.cfg.checkpoint.save and has_position:
        path = str(Path(state.cfg.checkpoint.save) / below)
    stock.maybe_save_dataloader_state(model, iterator, state.train_state.step, path, pg_collection=pg_collection)


@dataclass(frozen=True, slots=True)
class Announcement:
    """What follows a commit.

    Args:
        state: Bridge's; of an asynchronous save, steps may have followed by then.
        step: The save's.
        directory: The directory of the checkpoint.
        save: Bridge's `checkpoint.save` as the save began: a callback may have ended saving since.
        callback_manager: Bridge's, or None.
        model: The model, which is passed to callbacks.
        optimizer: The optimizer, which is passed to callbacks.
    """

    state: Any
    step: int
    directory: AnyPath
    save: str
    callback_manager: Any
    model: list[Any]
    optimizer: Any

    @property
    def calls_back(self) -> bool:
        """Whether there are callbacks to call."""
        return bool(should_fire(self.callback_manager, "on_checkpoint_save"))

    @property
    def _root(self) -> AnyPath:
        return self.directory.parent

    @property
    def _is_persistent(self) -> bool:
        return self._root == as_path(self.save)

    def make(self, saved: SaveResult) -> None:
        """Loggers (which raise nothing), callbacks, and last the old checkpoints, in the background."""
        state, step, cfg = self.state, self.step, self.state.cfg
        log_scalars("save", saved, state, step)
        print_rank_0(f"  successfully saved checkpoint from iteration {step:7d} to {self._root}")
        if is_last_rank():
            self._tell_trackers()
        if self.calls_back:
            users = self.callback_manager.user_state
            context = CallbackContext(state=state, model=self.model, user_state=users, optimizer=self.optimizer)
            self.callback_manager.fire("on_checkpoint_save", context)
        if get_rank_safe() == 0:
            self._prune(cfg.checkpoint.most_recent_k)

    def make_later(self, saved: SaveResult) -> None:
        """The same after an asynchronous save, of which Bridge's progress log says when it ended, too."""
        if self.state.cfg.logger.log_progress and self._is_persistent:
            said = f"Saved async checkpoint\tIteration: {self.step}"
            stock.append_to_progress_log(self.save, said, barrier=False)
        self.make(saved)

    def _tell_trackers(self) -> None:
        state, step, where = self.state, self.step, (str(self.directory), str(self._root))
        wandb_utils.on_save_checkpoint_success(*where, step, wandb_writer=state.wandb_logger)
        if state.cfg.logger.mlflow_log_artifacts:
            mlflow_utils.on_save_checkpoint_success(*where, step, mlflow_logger=state.mlflow_logger)
        comet_utils.on_save_checkpoint_success(*where, step, comet_logger=state.comet_logger)

    def _prune(self, keep: int) -> None:
        """What `most_recent_k` has no room for; what trackers name stays, and what a restart would begin from."""
        if not self._is_persistent:  # Bridge keeps two
            keep = 2 if keep < 0 else keep
        if keep > -1:
            prune_later(self._root, max(1, keep), also_keep=self._chosen)

    @property
    def _chosen(self) -> int | None:
        """The iteration in the same root that a restart would begin from, as this run did."""
        checkpoint = self.state.cfg.checkpoint
        is_here = checkpoint.load is not None and as_path(checkpoint.load) == self._root
        return checkpoint.ckpt_step if is_here else None
