# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's `save_checkpoint` and `load_checkpoint` in this format; the same arguments.

Megatron-LM's own helpers make the random-number states and tell its loggers; the tracker is replaced last.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from megatron.training import checkpointing as stock
from megatron.training import ft_integration, get_args, one_logger_utils, wandb_utils
from megatron.training.utils import is_last_rank, print_rank_0

from mbridge_fsdp_ckpt import checkpoint
from mbridge_fsdp_ckpt.commit import trackers
from mbridge_fsdp_ckpt.errors import ConfigurationError, NotACheckpointError
from mbridge_fsdp_ckpt.format.metadata import has_metadata
from mbridge_fsdp_ckpt.format.names import (
    ARGUMENTS,
    ITERATION,
    KEPT_ARGUMENTS,
    RELEASE,
    STATE_TRACKER,
    STOCK_FORMAT,
    TRACKER,
)
from mbridge_fsdp_ckpt.integrations.common import pending, restoration
from mbridge_fsdp_ckpt.integrations.common.options import check_fills, warn_of_rerun
from mbridge_fsdp_ckpt.integrations.common.pending import Pending
from mbridge_fsdp_ckpt.integrations.common.progress import SAMPLES, Progress
from mbridge_fsdp_ckpt.integrations.common.root import chosen, find_checkpoint, same_on_all_ranks
from mbridge_fsdp_ckpt.integrations.megatron_lm import following
from mbridge_fsdp_ckpt.integrations.megatron_lm.choice import check_arguments, settings_in_use
from mbridge_fsdp_ckpt.io.store import AnyPath, as_path
from mbridge_fsdp_ckpt.remedies import Frontend, entry_point
from mbridge_fsdp_ckpt.saving.background.async_saves import async_saves
from mbridge_fsdp_ckpt.settings import Settings

_BEGIN_ANEW = "Load with --finetune, which takes weights alone and begins at 0."


@entry_point(Frontend.MEGATRON_LM)
def save_checkpoint(
    iteration: int,
    model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float,
    *_: Any,
    train_data_iterator: Any = None,
    release: bool = False,
    **__: Any,
) -> None:
    """Save at an iteration; with `--async-save` asynchronously.

    Raises:
        CheckpointError: The same on every rank; the previous checkpoint and the tracker stand.  Of an asynchronous
            save it is raised by the next one, once that has ended, or at the end.
    """
    args = get_args()
    check_arguments(args)
    warn_of_rerun()
    metrics = one_logger_utils.on_save_checkpoint_start(args.async_save)
    ft_integration.on_checkpointing_start()
    model = unwrap_model(model)
    root = as_path(args.save)
    directory = as_path(stock.get_checkpoint_name(str(root), iteration, release=release, return_base_dir=True))
    print_rank_0(f"saving checkpoint at iteration {iteration:7d} to {root} in fsdp_dtensor_safe format")
    stock.maybe_save_dataloader_state(train_data_iterator, iteration, getattr(args, "dataloader_save", None))
    interval, step = args.save_retain_interval, args.ckpt_step
    with async_saves().old_error_last():
        saving = (checkpoint.async_save if args.async_save else checkpoint.save)(
            directory,
            model=model[0] if len(model) == 1 else model,
            optimizer=None if args.no_save_optim else optimizer,
            values=_values(args, iteration, opt_param_scheduler, num_floating_point_operations_so_far),
            rank_values=_rank_values(args),
            after_commit=partial(following.publish, root, iteration, release=release, interval=interval, chosen=step),
            settings=_settings_of(args),
        )
        news = following.News(root, directory, iteration, metrics, args.async_save, args.log_progress)
        if isinstance(saving, checkpoint.SaveResult):
            news.tell()
        elif not saving.skipped:
            pending.put(Pending(saving, lambda saved: news.tell(), in_unison=False))
        ft_integration.on_checkpointing_end(is_async_finalization=False)


def _values(args: Any, iteration: int, scheduler: Any, operations: float) -> dict[str, Any]:
    values: dict[str, Any] = {
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "num_floating_point_operations_so_far": operations,
        ARGUMENTS: {name: getattr(args, name) for name in KEPT_ARGUMENTS if hasattr(args, name)},
    }
    if scheduler is not None and not args.no_save_optim:
        values["opt_param_scheduler"] = scheduler.state_dict()
    return values


def _rank_values(args: Any) -> dict[str, Any]:
    if args.no_save_rng:
        return {}
    groups = _groups()
    return {"rng_state": stock.get_rng_state(STOCK_FORMAT, tp_group=groups.tp, pp_group=groups.pp)}


def _groups() -> Any:
    return ProcessGroupCollection.use_mpu_process_groups(["tp", "pp", "dp"])


@entry_point(Frontend.MEGATRON_LM)
def maybe_finalize_async_save(blocking: bool = False, terminate: bool = False) -> None:
    """Before every iteration: tell of an asynchronous save that has ended well.  At the end: wait for it.

    Raises:
        CheckpointError: It failed, and this is the end.  The same on every rank.
    """
    if blocking or terminate:
        if pending.goes_on():
            print_rank_0("  waiting for the checkpoint that is being saved asynchronously")
        pending.finish()
    else:
        pending.look()


@entry_point(Frontend.MEGATRON_LM)
def load_checkpoint(
    ddp_model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    load_arg: str = "load",
    strict: bool = True,
    checkpointing_context: Any = None,
    skip_load_to_model_and_opt: bool = False,
    *_: Any,
    **__: Any,
) -> tuple[int, float]:
    """Load what the arguments name; also reads what stock wrote in `fsdp_dtensor`.

    Returns:
        (iteration, floating-point operations so far); (0, 0) where there is no checkpoint.

    Raises:
        CheckpointError: The same on every rank; nothing was changed unless it is a `LoadInterruptedError`.
    """
    check_fills(skips=skip_load_to_model_and_opt)
    args = get_args()
    directory = _located(args, load_arg)
    if directory is None:
        return 0, 0.0
    print_rank_0(f" loading fsdp_dtensor_safe checkpoint from {directory}")
    model = unwrap_model(ddp_model)
    fresh = args.finetune or directory.name == RELEASE
    with_state = not fresh and not args.no_load_optim and optimizer is not None
    progress: dict[str, Any] = {"iteration": 0, "operations": 0.0}
    loaded = (checkpoint.load if with_state else checkpoint.load_weights)(
        directory,
        model=model[0] if len(model) == 1 else model,
        optimizer=optimizer,
        accept=lambda read: _restoration(args, read, optimizer, opt_param_scheduler, progress, fresh=fresh),
        settings=_settings_of(args),
    )
    for text in loaded.warnings():
        print_rank_0(f"WARNING: {text}")
    print_rank_0(f"  successfully loaded checkpoint from {directory} at iteration {progress['iteration']}")
    if is_last_rank():
        wandb_utils.on_load_checkpoint_success(str(directory), str(directory.parent))
    if progress["iteration"] > 0:
        ft_integration.on_checkpoint_loaded(is_local_chkpt=False)
    return progress["iteration"], progress["operations"]


def _located(args: Any, load_arg: str) -> AnyPath | None:
    """The iteration directory, the same on all ranks; None where there is none, and need not be: that is said.

    Raises:
        NotACheckpointError: There has to be one, trackers contradict each other, or ranks find different ones.
    """
    load = getattr(args, load_arg)
    nothing = f"no checkpoint in {load}"
    found = same_on_all_ranks(
        lambda: _locate(args, load), lambda one: nothing if one is None else str(one), settings_in_use()
    )
    if found is None and args.exit_on_missing_checkpoint:
        raise NotACheckpointError(
            expected=f"a checkpoint in --{load_arg}",
            found=nothing,
            remedy="Check the path, or leave out --exit-on-missing-checkpoint.",
        )
    if found is None:
        print_rank_0(f"WARNING: could not find a checkpoint in {load}: will start from random")
    return found


def _locate(args: Any, load: str | None) -> AnyPath | None:
    """The iteration directory; where --load has none, that of --pretrained-checkpoint, to fine-tune from.

    Raises:
        NotACheckpointError: What --ckpt-step chooses, or what a tracker names, is not there, or nothing is in either.
    """
    pretrained = args.pretrained_checkpoint
    if pretrained is None or (load is not None and _has_one(load)):
        return None if load is None else _meant(load, args.ckpt_step)
    found = _meant(pretrained, args.ckpt_step)
    if found is None:
        raise NotACheckpointError(
            expected="a checkpoint in --load or --pretrained-checkpoint",
            found=f"none in {load} and {pretrained}",
            remedy="Check the paths.",
        )
    args.finetune = True
    return found


def _has_one(place: str) -> bool:
    """Whether a checkpoint is there, whichever is meant."""
    root = as_path(place)
    return has_metadata(root) or root.name.startswith(ITERATION) or bool(trackers.present(root))


def _meant(place: str, step: int | None = None) -> AnyPath | None:
    """The iteration directory that a place means; None where no checkpoint is there."""
    root = as_path(place)
    if step:  # 0: none, as Megatron-LM has it
        return chosen(root, step, "--ckpt-step")
    if has_metadata(root):
        return root
    found = find_checkpoint(root)
    if found == root:
        return root if root.name.startswith(ITERATION) else None
    _tell_if_not_its_own(root, found)
    return found


def _tell_if_not_its_own(root: AnyPath, found: AnyPath) -> None:
    """Megatron-LM itself reads one tracker; where Bridge has left a newer one, that counts for every reader here."""
    own = trackers.read(root / TRACKER)
    if own is not None and own.name != found.name and (root / own.name).is_dir():
        print_rank_0(
            f"WARNING: loading {found.name}, which {STATE_TRACKER} of Megatron-Bridge names, and not {own.name}, which "
            f"{TRACKER} names. To go on from that, give --ckpt-step {own.number}, or delete {STATE_TRACKER}."
        )


def _restoration(
    args: Any, loaded: Any, optimizer: Any, scheduler: Any, progress: dict[str, Any], *, fresh: bool
) -> Callable[[], None]:
    values, steps = loaded.values, list[Callable[[], None]]()
    saved = Progress(0, dict.fromkeys(SAMPLES, 0), 0.0) if fresh else Progress.of(values, remedy=_BEGIN_ANEW)
    if not fresh:
        _check_like(dict(values.get(ARGUMENTS, {})))
        if not args.no_load_optim:
            steps.append(_schedule(args, optimizer, scheduler, values, saved.samples["consumed_train_samples"]))
        if not args.no_load_rng:
            one_each = bool(args.data_parallel_random_init)
            groups = _groups()
            steps.append(
                restoration.generators(loaded, groups, one_a_data_rank=one_each, remedy="Load with --no-load-rng.")
            )

    def restore() -> None:
        stock.set_checkpoint_version(values.get("checkpoint_version", 0))
        progress["iteration"], progress["operations"] = saved.iteration, saved.operations
        stock.set_loaded_iteration(saved.iteration)
        vars(args).update(saved.samples)
        update_num_microbatches(consumed_samples=args.consumed_train_samples, verbose=True)
        for step in steps:
            step()

    return restore


def _schedule(args: Any, optimizer: Any, scheduler: Any, values: Any, consumed: int) -> Callable[[], None]:
    remedy = "Resume with the same schedule, or with --override-opt-param-scheduler, which puts that of the arguments "
    remedy += "in force, or with --use-checkpoint-opt-param-scheduler, the checkpoint's."
    missing = "Load with --no-load-optim."
    saved = None if scheduler is None else restoration.saved_schedule(values, "opt_param_scheduler", remedy=missing)
    configured = bool(args.override_opt_param_scheduler)
    if configured and saved is not None and _goes_by_samples():
        saved["num_steps"] = consumed
    return restoration.schedule(optimizer, scheduler, saved, configured=configured, remedy=remedy)


def _goes_by_samples() -> bool:
    """Whether Megatron-LM lets an overridden schedule stand at the samples consumed, as 0.20 does.

    It puts the configured bounds of the learning rate into the param groups then, as a load does here in any release;
    0.19 keeps the steps that the schedule has counted, which are fewer after skipped updates.
    """
    return "override_opt_param_scheduler" in inspect.unwrap(stock.load_checkpoint).__code__.co_consts


def _check_like(saved: dict[str, Any]) -> None:
    """Megatron-LM's own comparison of what must not change.

    Raises:
        ConfigurationError: Something did.
    """
    if not saved:
        return
    before = stock.get_checkpoint_version()
    stock._CHECKPOINT_VERSION = 3.0  # what it compares depends on it
    try:
        stock.check_checkpoint_args(Namespace(**saved))
    except (AssertionError, AttributeError) as error:
        raise ConfigurationError(
            expected="the model that was saved",
            found=str(error),
            remedy="Give the arguments of the saving run.",
            key="args",
        ) from error
    finally:
        stock._CHECKPOINT_VERSION = before


def _settings_of(args: Any) -> Settings:
    settings = settings_in_use().for_vocabulary(args.vocab_size or None)
    return settings.without_optimizer() if args.no_save_optim else settings
