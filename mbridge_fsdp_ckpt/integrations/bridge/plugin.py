# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`register()`: Megatron-Bridge learns the format name `fsdp_dtensor_safe`.

The training loop's checkpoints go through Bridge's own plug-in point, `checkpoint.custom_manager_class`.  Where that
does not reach, these are replaced, here and nowhere else, and only act for our format name (and, where a user asks for
a takeover, for the stock one):

    ConfigContainer.validate                         knows three format names by heart; sets custom_manager_class
    GlobalState.initialize_async_checkpoint_worker   would start processes for async_save, which ours does not use
    checkpointing.maybe_finalize_async_save          called directly by users with a loop of their own
    checkpointing.create_checkpoint_manager          called by set-up before it builds a model: what has to be there
    checkpointing.save_checkpoint                    called directly by save_megatron_model and by users
    checkpointing._load_checkpoint_from_path         called by load_checkpoint and by Bridge's set-up
    optim.sync_hybrid_device_optimizer_...           assumes a distributed optimizer without Megatron-FSDP

megatron-core itself is corrected in `upstream_fixes.corrections`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mbridge_fsdp_ckpt.integrations.bridge.choice import (
    check_format,
    check_settings,
    is_ours,
    presented_as_stock,
    settings_in_use,
    takeover_by_environment,
    use,
)
from mbridge_fsdp_ckpt.integrations.bridge.options import MANAGER
from mbridge_fsdp_ckpt.integrations.common import options
from mbridge_fsdp_ckpt.integrations.common.own_name import naming_format_in_errors
from mbridge_fsdp_ckpt.patching import Patches, rebind_everywhere
from mbridge_fsdp_ckpt.settings import Settings
from mbridge_fsdp_ckpt.upstream_fixes import corrections
from mbridge_fsdp_ckpt.versions import require

START_WORKER = "initialize_async_checkpoint_worker"
_patches: Patches | None = None


def register(settings: Settings | None = None, *, takeover: bool | None = None) -> None:
    """Make `checkpoint.ckpt_format=fsdp_dtensor_safe` work in Megatron-Bridge.

    Call it on every rank, before the configuration is validated and the optimizer is built.  A second call changes only
    what it is given.

    Args:
        settings: The settings of every save and load through Bridge.  None keeps those in use, at first the defaults.
        takeover: Whether runs that name the format `fsdp_dtensor` are saved and loaded by this package, too.  None
            means what the environment variable MBRIDGE_FSDP_CKPT_TAKEOVER says.

    Raises:
        UnsupportedVersionError: A package is not installed, or lacks a name that this package uses.
        ConfigurationError: The environment variable is neither 0 nor 1.
    """
    global _patches
    if takeover is None and _patches is None:
        takeover = takeover_by_environment()
    use(settings, takeover=takeover)
    if _patches is not None:
        return
    require("save and load", "corrections", "random states", "Bridge")
    patches = Patches()
    try:
        corrections.apply(__name__)
        _patch(patches)
    except BaseException:
        patches.undo()
        _disallow()
        corrections.withdraw(__name__)
        raise
    _patches = patches


def unregister() -> None:
    """Restore every function of Bridge and Megatron-Core that `register` replaced.  Does nothing unless registered."""
    global _patches
    if _patches is not None:
        _patches.undo()
        _disallow()
        corrections.withdraw(__name__)
        use(Settings(), takeover=False)
        options.forget()
        _patches = None


def _patch(patches: Patches) -> None:
    from megatron.bridge.training import checkpointing
    from megatron.bridge.training.config import ConfigContainer
    from megatron.bridge.training.state import GlobalState
    from megatron.bridge.utils.instantiate_utils import target_allowlist

    from mbridge_fsdp_ckpt.integrations.bridge import conversion_seams, manager
    from mbridge_fsdp_ckpt.integrations.bridge.differences import copies_refresher
    from mbridge_fsdp_ckpt.upstream_fixes.bridge_export import correct_export
    from mbridge_fsdp_ckpt.upstream_fixes.full_dim_norms import mark_as_sharded

    target_allowlist.add_exact(MANAGER)  # Bridge's prefixes would let a checkpoint name everything below them
    patches.set(ConfigContainer, "validate", _wrap_validate(ConfigContainer.validate))
    patches.set(GlobalState, START_WORKER, _wrap_start_worker(getattr(GlobalState, START_WORKER)))
    save, load = checkpointing.save_checkpoint, checkpointing._load_checkpoint_from_path
    finalize, create = checkpointing.maybe_finalize_async_save, checkpointing.create_checkpoint_manager
    sync = copies_refresher()
    replacements = [
        (save, _routed(save, manager.save_checkpoint)),
        (load, _routed(load, manager.load_from_path)),
        (finalize, _wrap_finalize(finalize, manager.finalize)),
        (create, _wrap_create_manager(create)),
        *([] if sync is None else [(sync, _wrap_sync_copies(sync))]),
        *conversion_seams.replacements(is_ours),
    ]
    correct_export(patches)
    conversion_seams.follow_trackers(patches)
    mark_as_sharded(patches)
    rebind_everywhere(patches, replacements)


def _disallow() -> None:
    from megatron.bridge.utils.instantiate_utils import target_allowlist

    target_allowlist.remove_exact(MANAGER)


def _routed(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of Bridge to call its replacement where the run is ours.

    Both take Bridge's state by name, or as the argument that has `cfg`.
    """

    @functools.wraps(original)
    def routed(*args: Any, **kwargs: Any) -> Any:
        state = kwargs.get("state") or next(arg for arg in args if hasattr(arg, "cfg"))
        check_format(state.cfg.checkpoint.ckpt_format)
        if not is_ours(state.cfg.checkpoint.ckpt_format):
            return original(*args, **kwargs)
        options.warn_once(check_settings(state.cfg))  # a user's own loop may not have validated the configuration
        return replacement(*args, **kwargs)

    return routed


def _wrap_validate(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap `ConfigContainer.validate` to check the options of our runs, and to choose this package's manager for them.

    Bridge validates the rest with the stock format's name, the only one of this kind that it knows.
    """

    @functools.wraps(original)
    def validate(config: Any) -> None:
        checkpoint = config.checkpoint
        check_format(checkpoint.ckpt_format)
        if not is_ours(checkpoint.ckpt_format):
            original(config)
            return
        options.warn_once(check_settings(config))
        checkpoint.custom_manager_class = MANAGER
        with naming_format_in_errors(checkpoint.ckpt_format), presented_as_stock(checkpoint):
            original(config)

    return validate


def _wrap_start_worker(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap `initialize_async_checkpoint_worker` to start no process for our runs, which have their own."""

    @functools.wraps(original)
    def start(state: Any) -> None:
        if state.cfg is None or not is_ours(state.cfg.checkpoint.ckpt_format):
            original(state)

    return start


def _wrap_finalize(original: Callable[..., None], replacement: Callable[..., None]) -> Callable[..., None]:
    """Wrap `maybe_finalize_async_save` to call the replacement for our runs."""

    @functools.wraps(original)
    def finalize(global_state: Any, ckpt_cfg: Any, blocking: bool = False, terminate: bool = False) -> None:
        if is_ours(ckpt_cfg.ckpt_format):
            replacement(global_state.train_state.step, blocking=blocking, terminate=terminate)
        else:
            original(global_state, ckpt_cfg, blocking=blocking, terminate=terminate)

    return finalize


def _wrap_create_manager(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap `create_checkpoint_manager` to check first that the checkpoint to resume from exists."""
    from mbridge_fsdp_ckpt.integrations.bridge.locate import check_there

    @functools.wraps(original)
    def create_checkpoint_manager(checkpoint_config: Any) -> Any:
        if is_ours(checkpoint_config.ckpt_format):
            check_there(checkpoint_config, settings_in_use())
        return original(checkpoint_config)

    return create_checkpoint_manager


def _wrap_sync_copies(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Wrap the function that refreshes a hybrid optimizer's fp32 copies, to refresh them under Megatron-FSDP, too."""
    from mbridge_fsdp_ckpt.upstream_fixes.hybrid_optimizer import ShardedHybridDeviceOptimizer

    @functools.wraps(original)
    def sync(optimizer: Any) -> bool:
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        under_fsdp = [p for p in parts if getattr(getattr(p, "ddp_config", None), "use_megatron_fsdp", False)]
        if not under_fsdp:
            return original(optimizer)
        hybrid = [p.optimizer for p in under_fsdp if isinstance(p.optimizer, ShardedHybridDeviceOptimizer)]
        for inner in hybrid:
            inner.update_fp32_param_by_new_param()
        return bool(hybrid)

    return sync
