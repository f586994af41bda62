"""What Bridge does around a save besides tensors: run files, trackers, loggers, old checkpoints."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from megatron.bridge.training import checkpointing as stock
from megatron.bridge.training.callbacks import CallbackContext, should_fire
from megatron.bridge.training.utils import checkpoint_utils as names
from megatron.bridge.training.utils import comet_utils, mlflow_utils, wandb_utils
from megatron.bridge.utils.common_utils import get_rank_safe, is_last_rank, print_rank_0
from megatron.bridge.utils.yaml_utils import safe_yaml_representers
from megatron.training.config.container import ConfigContainerBase

from mbridge_fsdp_ckpt.agree.outcome import Outcome
from mbridge_fsdp_ckpt.bridge.differences import dataloader_directory
from mbridge_fsdp_ckpt.bridge.locate import NON_PERSISTENT
from mbridge_fsdp_ckpt.bridge.scalars import log_scalars
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.saving.saved import Saved
from mbridge_fsdp_ckpt.storage.commit.retention import prune_later
from mbridge_fsdp_ckpt.storage.files import replace_file
from mbridge_fsdp_ckpt.storage.store import AnyPath, as_path

_yaml: Any = import_module("yaml")  # it brings no types
_FAST = _yaml.CSafeDumper if _yaml.__with_libyaml__ else _yaml.SafeDumper  # the first is eight times as fast
_DUMPER: Any = type("_OfNodes", (_FAST,), {})  # nodes among the values are written as they are
_DUMPER.add_multi_representer(_yaml.Node, lambda _, node: node)
_UNCHANGING = frozenset({type(None), bool, int, float, str})
_OWN_WAYS = ("as_dict", "to_cfg_dict", "to_dict")
"""Methods of what tells Bridge itself how it is written."""


def root_directory(checkpoint_config: Any, *, non_persistent: bool) -> AnyPath:
    """Where iteration directories go."""
    if not non_persistent:
        return as_path(checkpoint_config.save)
    other = checkpoint_config.non_persistent_global_ckpt_dir
    return as_path(other) if other else as_path(checkpoint_config.save) / NON_PERSISTENT


def save_dataloader_state(state: Any, model: list[Any], iterator: Any, pg_collection: Any) -> None:
    """Megatron-Energon's position, beside the checkpoints, by Bridge's rule."""
    path = getattr(state.cfg.dataset, "dataloader_save", None)
    below = dataloader_directory()
    has_position = hasattr(getattr(iterator, "iterable", None), "save_state")
    if path is None and below is not None and state.cfg.checkpoint.save and has_position:
        path = str(Path(state.cfg.checkpoint.save) / below)
    stock.maybe_save_dataloader_state(model, iterator, state.train_state.step, path, pg_collection=pg_collection)


def run_files(cfg: Any, train_state: dict[str, torch.Tensor]) -> Callable[[Path], None]:
    """Rank 0: writes the files that Bridge expects in an iteration directory, part of the same commit.

    They are as of now, whenever it is called: training changes its configuration, and Bridge's way to look at one is
    not made for two threads.  Dictionaries and text, most of the work, are made when they are written: training need
    not wait for that.
    """
    looked = Outcome.of(lambda: _looked_at(cfg) if get_rank_safe() == 0 else None, get_rank_safe(), "writing run files")
    return lambda staging: _write_run_files(staging, cfg, train_state, looked)


def _write_run_files(staging: Path, cfg: Any, train_state: dict[str, torch.Tensor], looked: Outcome[Any]) -> None:
    if isinstance(looked.brought, CheckpointError):
        raise looked.brought
    config = _yaml.dump(looked.brought.to_dict(), Dumper=_DUMPER, encoding="utf-8", default_flow_style=False)
    (staging / Path(names.get_checkpoint_train_state_filename("")).name).write_bytes(_torch_bytes(train_state))
    (staging / Path(names.get_checkpoint_run_config_filename("")).name).write_bytes(config)
    tokenizer = getattr(cfg.dataset, "tokenizer", None) if cfg.dataset else None
    if cfg.checkpoint.save_tokenizer_assets and tokenizer is not None:
        stock.save_tokenizer_assets(tokenizer, cfg.tokenizer, str(staging))


def write_trackers(root: AnyPath, step: int, train_state: dict[str, torch.Tensor]) -> None:
    """Rank 0, after the commit and before the other ranks go on: let Bridge's trackers name the checkpoint."""
    state_tracker = as_path(names.get_checkpoint_train_state_filename(str(root), names.TRACKER_PREFIX))
    replace_file(state_tracker, _torch_bytes(train_state))
    replace_file(as_path(names.get_checkpoint_tracker_filename(str(root))), str(step).encode())


@dataclass(frozen=True, slots=True)
class Announcement:
    """What follows a commit.

    Args:
        state: Bridge's; of a save beside the training, steps may have followed by then.
        step: The save's.
        directory: Where it is.
        save: Bridge's `checkpoint.save` as the save began: a callback may have ended saving since.
        callback_manager: Bridge's, or None.
        model: What callbacks get.
        optimizer: What callbacks get.
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

    def make(self, saved: Saved) -> None:
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

    def make_later(self, saved: Saved) -> None:
        """The same after a save beside the training, of which Bridge's progress log says when it ended, too."""
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
        """What `most_recent_k` has no room for; the checkpoint that was just committed always stays."""
        if not self._is_persistent:  # Bridge keeps two
            keep = 2 if keep < 0 else keep
        if keep > -1:
            prune_later(self._root, max(1, keep), also_keep=self.step)


def _looked_at(cfg: Any) -> Any:
    """A configuration of which Bridge's `to_dict` gives what its `to_yaml` would write now.

    See `megatron/training/config/container.py`: copying the fields takes a fraction of the time of `to_dict`.
    """
    with safe_yaml_representers():
        node = _yaml.SafeDumper(io.StringIO(), default_flow_style=False).represent_data

        def other(value: Any) -> Any:
            if _is_read_field_by_field(value):
                return _with_fields(value, other)
            return _copied(cfg._convert_value_to_dict(value), node)

        return other(cfg)


def _copied(value: Any, other: Callable[[Any], Any]) -> Any:
    """Containers, copied, of values that do not change; of all others, what `other` makes of them."""
    kind = type(value)
    if kind in _UNCHANGING:
        return value
    if kind is dict:
        return {name: _copied(part, other) for name, part in value.items()}
    if kind in (list, tuple):
        return [_copied(part, other) for part in value]
    return other(value)


def _is_read_field_by_field(value: Any) -> bool:
    """Whether Bridge reads a value's fields and nothing else of it, from a copy as well."""
    kind = type(value)
    if isinstance(value, ConfigContainerBase):
        return True
    return is_dataclass(kind) and hasattr(value, "__dict__") and not any(hasattr(kind, way) for way in _OWN_WAYS)


def _with_fields(value: Any, other: Callable[[Any], Any]) -> Any:
    """A dataclass with its fields copied."""
    copied = object.__new__(type(value))
    parts = {field.name: _copied(getattr(value, field.name), other) for field in fields(value)}
    copied.__dict__.update(vars(value) | parts)
    return copied


def _torch_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
