# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Bridge's checkpoints in this format: what is saved beside model and optimizer, and where it comes back.

Bridge's own helpers make the state (RNG, scheduler, run config); the trackers are replaced last, in one step
each, before any rank goes on.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.bridge.training import checkpointing as stock
from megatron.bridge.training import fault_tolerance
from megatron.bridge.training.utils import checkpoint_utils as names
from megatron.bridge.training.utils.pg_utils import get_pg_collection
from megatron.bridge.utils.common_utils import print_rank_0
from megatron.core.utils import unwrap_model

from mbridge_fsdp_ckpt import checkpoint
from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.format.names import PROGRESS, STOCK_FORMAT
from mbridge_fsdp_ckpt.integrations.bridge import after_save, differences
from mbridge_fsdp_ckpt.integrations.bridge.after_save import Announcement
from mbridge_fsdp_ckpt.integrations.bridge.choice import (
    check_settings,
    presented_as_stock,
    settings_in_use,
    settings_of,
)
from mbridge_fsdp_ckpt.integrations.bridge.locate import Located, check_may_be_missing, check_there, located
from mbridge_fsdp_ckpt.integrations.bridge.plain_model import load_plain
from mbridge_fsdp_ckpt.integrations.bridge.restoration import Parts, restoration
from mbridge_fsdp_ckpt.integrations.bridge.run_files import run_files, write_trackers
from mbridge_fsdp_ckpt.integrations.bridge.scalars import log_scalars
from mbridge_fsdp_ckpt.integrations.common import pending
from mbridge_fsdp_ckpt.integrations.common.options import check_fills, warn_of_rerun
from mbridge_fsdp_ckpt.integrations.common.pending import Pending
from mbridge_fsdp_ckpt.io.store import AnyPath, as_path
from mbridge_fsdp_ckpt.remedies import Frontend, entry_point
from mbridge_fsdp_ckpt.saving.background.async_saves import async_saves


class SafeCheckpointManager:
    """Bridge's `CheckpointManager` protocol for the training loop.

    An untrusted run configuration may name it: to make one does nothing.
    """

    def __init__(self, checkpoint_config: Any) -> None:
        self.checkpoint_config = checkpoint_config
        self.checkpointing_context: dict[str, Any] = {}

    def save(self, ctx: Any, callback_manager: Any = None) -> None:
        """Save what the context holds."""
        save_checkpoint(
            ctx.state,
            ctx.model,
            ctx.optimizer,
            ctx.opt_param_scheduler,
            ctx.num_floating_point_operations_so_far,
            checkpointing_context=self.checkpointing_context,
            non_persistent_ckpt=ctx.non_persistent_ckpt,
            train_data_iterator=ctx.train_data_iterator,
            pg_collection=ctx.pg_collection,
            callback_manager=callback_manager,
        )

    def load(self, ctx: Any) -> tuple[int, int]:
        """Load into what the context holds.

        Returns:
            (iteration, floating-point operations so far); (0, 0) where there is no checkpoint.
        """
        progress: tuple[int, int] = stock.load_checkpoint(
            ctx.state,
            ctx.model,
            ctx.optimizer,
            ctx.opt_param_scheduler,
            strict=ctx.strict,
            checkpointing_context=self.checkpointing_context,
            skip_load_to_model_and_opt=ctx.skip_load_to_model_and_opt,
            pg_collection=ctx.pg_collection,
        )
        return progress

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        """Follow up an asynchronous save that has ended, or wait for it; see `finalize`."""
        finalize(state.train_state.step, blocking=blocking, terminate=terminate)


@entry_point(Frontend.BRIDGE)
def save_checkpoint(
    state: Any,
    model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: int,
    checkpointing_context: dict[str, Any] | None = None,
    pipeline_rank: int | None = None,
    tensor_rank: int | None = None,
    non_persistent_ckpt: bool = False,
    train_data_iterator: Any = None,
    preprocess_common_state_dict_fn: Any = None,
    prebuilt_state_dict: dict[str, Any] | None = None,
    pg_collection: Any = None,
    callback_manager: Any = None,
    module_name: str | None = None,
) -> None:
    """Bridge's `save_checkpoint` for this format; the same arguments.

    With `async_save` it returns while the save is in progress, which `finalize_async_saves` follows up.

    Raises:
        CheckpointError: The same on every rank; the previous checkpoint and the trackers stand.  With `async_save` it
            may be that of the previous save: then this one was committed.
    """
    cfg, step = state.cfg, state.train_state.step
    _check(cfg, model, prebuilt_state_dict)
    fault_tolerance.on_checkpointing_start(state)
    model, pg_collection = _unwrapped(model, pg_collection)
    root = as_path(after_save.root_directory(cfg.checkpoint, non_persistent=non_persistent_ckpt))
    directory = as_path(names.get_checkpoint_name(str(root), step))
    print_rank_0(f"saving checkpoint at iteration {step:7d} to {root} in fsdp_dtensor_safe format")
    after_save.save_dataloader_state(state, model, train_data_iterator, pg_collection)
    train_state = _train_state(state, num_floating_point_operations_so_far)
    options: dict[str, Any] = {
        "model": model[0] if len(model) == 1 else model,
        "optimizer": optimizer if cfg.checkpoint.save_optim else None,
        "values": _values(state, opt_param_scheduler, train_state),
        "rank_values": _rank_values(cfg, pg_collection),
        "include": cfg.peft.adapter_key_filter if cfg.peft is not None else None,
        "add_files": run_files(cfg, train_state),
        "after_commit": lambda: write_trackers(root, step, train_state),
        "settings": settings_of(cfg),
    }
    announcement = Announcement(state, step, directory, cfg.checkpoint.save, callback_manager, model, optimizer)
    with async_saves().old_error_last():
        begun = _save(directory, options, announcement, background=cfg.checkpoint.async_save)
        fault_tolerance.on_checkpointing_end(global_state=state, is_async_finalization=not begun)


def _save(directory: AnyPath, options: dict[str, Any], announcement: Announcement, *, background: bool) -> bool:
    """Save, or begin to save.  The previous save has ended by then, and is followed up first.

    Returns:
        Whether it did; False if the previous save is in progress and `when_busy` is "skip".
    """
    if not background:
        saved = checkpoint.save(directory, **options)
        pending.settle()
        announcement.make(saved)
        return True
    saving = checkpoint.async_save(directory, **options)
    if not saving.skipped:
        pending.put(Pending(saving, announcement.make_later, announcement.calls_back))
    return not saving.skipped


@entry_point(Frontend.BRIDGE)
def finalize(step: int, *, blocking: bool, terminate: bool) -> None:
    """What Bridge asks for after each step, and at the end: to follow up an asynchronous save that has ended.

    Args:
        step: The training step.
        blocking: Whether to wait for the save, not only to look.
        terminate: Whether it was the last one: the process that writes ends, and its memory is given back.

    Raises:
        CheckpointError: The save failed, and its error has not been raised yet: the same on every rank.  Not by a look.
    """
    if not (blocking or terminate):
        pending.look(step)
        return
    try:
        pending.finish()
    finally:
        if terminate:
            async_saves().stop()


def _unwrapped(model: list[Any], pg_collection: Any) -> tuple[list[Any], Any]:
    """The models without what Megatron wraps around them, and their process groups."""
    inner = unwrap_model(model)
    return inner, pg_collection or get_pg_collection(inner)


def _check(cfg: Any, model: list[Any], prebuilt_state_dict: dict[str, Any] | None) -> None:
    check_settings(cfg)
    warn_of_rerun()
    if prebuilt_state_dict is not None or not model:
        raise ConfigurationError(
            expected="a model to save",
            found="a state dict built beforehand (low_memory_save)",
            remedy="Pass low_memory_save=False: this format never copies the state anyway.",
        )


def _train_state(state: Any, operations: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = state.train_state.state_dict()
    found["floating_point_operations_so_far"] = torch.tensor(operations, dtype=torch.float64)
    return found


def _values(state: Any, scheduler: Any, train_state: dict[str, torch.Tensor]) -> dict[str, Any]:
    values: dict[str, Any] = {
        "checkpoint_version": 3.0,
        "iteration": state.train_state.step,
        PROGRESS: train_state,
    }
    if scheduler is not None:
        values["opt_param_scheduler"] = scheduler.state_dict()
    return values


def _rank_values(cfg: Any, pg_collection: Any) -> dict[str, Any]:
    if not cfg.checkpoint.save_rng:
        return {}
    random = stock.get_rng_state(
        cfg.rng.data_parallel_random_init if cfg.rng is not None else False,
        STOCK_FORMAT,
        pg_collection=pg_collection,
    )
    return {"rng_state": random}


@entry_point(Frontend.BRIDGE)
def load_from_path(
    load_dir: str,
    state: Any,
    model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    strict: bool = True,
    checkpointing_context: dict[str, Any] | None = None,
    skip_load_to_model_and_opt: bool = False,
    ignore_ckpt_step: bool = False,
    pg_collection: Any = None,
    module_name: str | None = None,
) -> tuple[int, int]:
    """Bridge's `_load_checkpoint_from_path` for this format; the same arguments.  Reads stock `fsdp_dtensor` too.

    Returns:
        (iteration, floating-point operations so far); (0, 0) where there is no checkpoint, and none has to be there.

    Raises:
        CheckpointError: The same on every rank; nothing was changed unless it is a `LoadInterruptedError`.
    """
    cfg = state.cfg
    is_base = ignore_ckpt_step and cfg.peft is not None  # of adapters that are about to be made
    if is_base:
        check_there(cfg.checkpoint, settings_in_use(), adapters=True)
    found = located(load_dir, cfg.checkpoint, None if ignore_ckpt_step else cfg.checkpoint.ckpt_step, settings_in_use())
    if found is None:
        return _nothing_to_load(load_dir, cfg)
    if found.hugging_face:
        with presented_as_stock(cfg.checkpoint):
            return _stock_load(load_dir, state, model, optimizer, opt_param_scheduler, skip_load_to_model_and_opt)
    check_fills(skips=skip_load_to_model_and_opt)
    print_rank_0(f" loading fsdp_dtensor_safe checkpoint from {found.directory}")
    if is_base:  # nothing wraps the model yet
        load_plain(found.directory, unwrap_model(model))
        return 0, 0
    return _load_all(
        load_dir, found, state, model, optimizer, opt_param_scheduler, checkpointing_context, pg_collection
    )


def _load_all(
    load_dir: str,
    found: Located,
    state: Any,
    model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    checkpointing_context: dict[str, Any] | None,
    pg_collection: Any,
) -> tuple[int, int]:
    """Load what the configuration asks for; the result is `load_from_path`'s."""
    cfg = state.cfg
    model, pg_collection = _unwrapped(model, pg_collection)
    wanted = _wanted(cfg.checkpoint, optimizer, found)
    load = checkpoint.load if wanted.optimizer else checkpoint.load_weights
    loaded = load(
        found.directory,
        model=model[0] if len(model) == 1 else model,
        optimizer=optimizer,
        include=_adapters_only(cfg, load_dir),
        accept=lambda read: restoration(state, read, found, wanted, optimizer, opt_param_scheduler, pg_collection),
        settings=settings_of(cfg),
    )
    _tell(loaded, state)
    differences.record_dataloader_directory(checkpointing_context, str(found.persistent_root))
    print_rank_0(f"  successfully loaded checkpoint from {found.directory} at iteration {state.train_state.step}")
    if state.train_state.step > 0:
        fault_tolerance.on_checkpoint_loaded(is_local_chkpt=False, global_state=state)
    return state.train_state.step, state.train_state.floating_point_operations_so_far


def _nothing_to_load(load_dir: str, cfg: Any) -> tuple[int, int]:
    check_may_be_missing(load_dir, cfg.checkpoint)
    print_rank_0(f"WARNING: could not find a checkpoint in {load_dir}: will start from random")
    return 0, 0


def _tell(loaded: checkpoint.LoadResult, state: Any) -> None:
    log_scalars("load", loaded, state, state.train_state.step)
    for text in loaded.warnings():
        print_rank_0(f"WARNING: {text}")


def _wanted(checkpoint_config: Any, optimizer: Any, found: Located) -> Parts:
    """Which parts the run asks for; of a release weights alone, as in Bridge."""
    resumes = not checkpoint_config.finetune
    goes_on = resumes and not found.release
    with_state = goes_on and checkpoint_config.load_optim
    if with_state and not found.optimizer:
        text = "was saved without optimizer state (checkpoint.save_optim=False): optimizer and schedule start afresh"
        print_rank_0(f"WARNING: {found.directory} {text}")
        with_state = False
    return Parts(
        optimizer=with_state and optimizer is not None,
        schedule=with_state,
        random=goes_on and checkpoint_config.load_rng,
        progress=resumes,
    )


def _stock_load(load_dir: str, state: Any, model: Any, optimizer: Any, scheduler: Any, skip: bool) -> tuple[int, int]:
    """A Hugging Face directory is no checkpoint of ours: Bridge reads it."""
    result: tuple[int, int] = stock._load_checkpoint_from_path.__wrapped__(
        load_dir, state, model, optimizer, scheduler, skip_load_to_model_and_opt=skip
    )
    return result


def _adapters_only(cfg: Any, load_dir: str) -> Any:
    """Bridge's rule: resuming a PEFT run reads adapters, its pretrained checkpoint is read whole."""
    resumes = (
        cfg.peft is not None
        and load_dir == cfg.checkpoint.load
        and load_dir != cfg.checkpoint.pretrained_checkpoint
        and not cfg.checkpoint.finetune
    )
    return cfg.peft.adapter_key_filter if resumes else None
