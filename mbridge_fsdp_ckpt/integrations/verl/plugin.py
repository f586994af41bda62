# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""VeRL's checkpoints go through this package where its configuration asks for `fsdp_dtensor_safe`.

These are replaced, here and nowhere else, once VeRL has imported the module; they act for our format name alone:

    MegatronCheckpointManager.__init__                          refuses what cannot work, before training
    MegatronCheckpointManager.load_checkpoint                   all ranks find what they are to load
    CheckpointHandler._determine_resume_path                    the same, where the SFT trainer looks on each rank
    MegatronCheckpointManager._save_megatron_fsdp_checkpoint    the sharded checkpoint of Megatron-FSDP
    MegatronCheckpointManager._load_megatron_fsdp_checkpoint
    MegatronCheckpointManager._dispatch_finalize                what follows a save, once that is committed
    MegatronEngine.save_checkpoint                              waits for the last save of a run
    offload_megatron_model_to_cpu, offload_megatron_optimizer   wait until what they move is copied
    ActorRolloutRefWorker.update_weights                        gives staging memory back to the rollout that it wakes;
                                                                left as it is where a version has no such method
    MegatronEngine._build_optimizer                             calls `bridge.register()` first: under Megatron-FSDP,
                                                                Megatron's own HybridDeviceOptimizer cannot step

VeRL swallows what a plug-in raises while it is imported.  So nothing is checked then: a version that does not fit is
an error when an optimizer or a manager is built that asks for our format.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from mbridge_fsdp_ckpt.errors import ConfigurationError, NotACheckpointError
from mbridge_fsdp_ckpt.integrations.common.after_import import AfterImport
from mbridge_fsdp_ckpt.integrations.common.options import check, forget, warn_once
from mbridge_fsdp_ckpt.integrations.verl.choice import Choice, choice_of
from mbridge_fsdp_ckpt.integrations.verl.options import OPTIONS, given
from mbridge_fsdp_ckpt.patching import Patches
from mbridge_fsdp_ckpt.versions import probe, require

MANAGER_MODULE = "verl.utils.checkpoint.megatron_checkpoint_manager"
ENGINE_MODULE = "verl.workers.engine.megatron.transformer_impl"
WORKER_MODULE = "verl.workers.engine_workers"
HANDLER_MODULE = "verl.utils.checkpoint.checkpoint_handler"

_hook: AfterImport | None = None
_patches = Patches()
_has_registered = False
_log = logging.getLogger(__name__)

_Method = Callable[..., Any]
_Makers = dict[str, Callable[[_Method], _Method]]


def install() -> None:
    """Replace the methods above, in each module at once if it is loaded, else when it is imported.  Idempotent."""
    global _hook
    if _hook is None:
        _hook = AfterImport(
            {
                MANAGER_MODULE: _patch_manager,
                ENGINE_MODULE: _patch_engine,
                WORKER_MODULE: _patch_worker,
                HANDLER_MODULE: _patch_handler,
            }
        )
        _hook.install()


def uninstall() -> None:
    """Restore every method that was replaced.  Does nothing unless installed."""
    global _hook, _has_registered
    if _hook is not None:
        _hook.uninstall()
        _patches.undo()
        forget()
        _hook = None
    if _has_registered:
        from mbridge_fsdp_ckpt.integrations.bridge import unregister

        unregister()
        _has_registered = False


def _patch_manager(module: ModuleType) -> None:
    methods: _Makers = {
        "__init__": _wrap_init,
        "load_checkpoint": _wrap_load_checkpoint,
        "_save_megatron_fsdp_checkpoint": _wrap_save_fsdp_checkpoint,
        "_load_megatron_fsdp_checkpoint": functools.partial(_wrap_load_fsdp_checkpoint, module),
        "_dispatch_finalize": _wrap_dispatch_finalize,
    }
    _patch(module, "MegatronCheckpointManager", methods)


def _patch_engine(module: ModuleType) -> None:
    _patch(
        module, "MegatronEngine", {"_build_optimizer": _wrap_build_optimizer, "save_checkpoint": _wrap_save_checkpoint}
    )
    for name in ("offload_megatron_model_to_cpu", "offload_megatron_optimizer"):
        if hasattr(module, name):
            _patches.set(module, name, _wrap_offload(getattr(module, name)))


def _patch_worker(module: ModuleType) -> None:
    _patch(module, "ActorRolloutRefWorker", {"update_weights": _wrap_update_weights})


def _patch_handler(module: ModuleType) -> None:
    _patch(module, "CheckpointHandler", {"_determine_resume_path": _wrap_determine_resume_path})


def _patch(module: ModuleType, name: str, methods: _Makers) -> None:
    """Replace methods of a class of VeRL, and warn of those that this version of VeRL lacks.

    A run that uses the format fails later, in `_require`, if the version does not fit.

    Args:
        module: The module of the class.
        name: The name of the class.
        methods: For each method, a function that takes the original and returns the replacement.
    """
    owner = getattr(module, name, None)
    missing = [method for method in methods if not hasattr(owner, method)] if owner is not None else [name]
    if missing:
        _log.warning("%s has no %s: this release was made for another version of VeRL", module.__name__, missing)
    for method, make in methods.items():
        if owner is not None and method not in missing:
            _patches.set(owner, method, make(getattr(owner, method)))


def _require() -> None:
    require("VeRL", "save and load", "corrections", "random states", "Bridge")


def _wrap_init(original: _Method) -> _Method:
    """Wrap `MegatronCheckpointManager.__init__` to check versions and options of our runs before training."""

    @functools.wraps(original)
    def init(manager: Any, *args: Any, **kwargs: Any) -> None:
        original(manager, *args, **kwargs)
        choice = choice_of(manager.checkpoint_config)
        if choice is not None and (manager.use_megatron_fsdp or not choice.by_takeover):
            _require()
            probe("a MegatronCheckpointManager", manager)
            _check(manager, choice)

    return init


def _check(manager: Any, choice: Choice) -> None:
    """Refuse options that the format does not support, before training begins.

    Raises:
        ConfigurationError: Megatron-FSDP is not used, or in version 2; an option is refused; or `when_busy` is "skip".
    """
    warn_once(check(manager.checkpoint_config, given(manager.checkpoint_config), OPTIONS, _written))
    if not manager.use_megatron_fsdp:
        raise ConfigurationError(
            expected=f"Megatron-FSDP with {choice.said}",
            found=f"use_megatron_fsdp=False (role {manager.role})",
            remedy="Set megatron.use_megatron_fsdp=True for this role (engine.use_megatron_fsdp for the SFT trainer), "
            "or another format by +...checkpoint.mbridge_config.ckpt_format=torch_dist.",
        )
    if manager.checkpoint_config.async_save and choice.settings.when_busy == "skip":
        raise ConfigurationError(
            expected="when_busy='wait' with checkpoint.async_save=True: VeRL relies on every save that it asks for",
            found="when_busy='skip', which leaves saves out",
            remedy="Leave when_busy out.",
        )
    from mbridge_fsdp_ckpt.live.readers.megatron_fsdp import find_fsdp_module

    find_fsdp_module(manager.model)


def _written(name: str, value: Any) -> str:
    return f"checkpoint.{name}={value}"


def _wrap_save_fsdp_checkpoint(original: _Method) -> _Method:
    """Wrap `_save_megatron_fsdp_checkpoint` to save our runs with this package."""

    @functools.wraps(original)
    def save(manager: Any, dist_checkpoint_path: str) -> Any:
        choice = choice_of(manager.checkpoint_config)
        if choice is None:
            return original(manager, dist_checkpoint_path)
        from mbridge_fsdp_ckpt.integrations.verl.manager import save

        return save(manager, dist_checkpoint_path, choice.settings)

    return save


def _wrap_load_checkpoint(original: _Method) -> _Method:
    """Wrap `MegatronCheckpointManager.load_checkpoint` to check that all ranks find the directory.

    A rank on a host without it would fail alone otherwise, before it meets the other ranks.
    """

    @functools.wraps(original)
    def load_checkpoint(manager: Any, local_path: str | None, *args: Any, **kwargs: Any) -> Any:
        if local_path is not None and manager.use_megatron_fsdp and choice_of(manager.checkpoint_config) is not None:
            _agree(manager, lambda: _existing(local_path))
        return original(manager, local_path, *args, **kwargs)

    return load_checkpoint


def _wrap_determine_resume_path(original: _Method) -> _Method:
    """Wrap `CheckpointHandler._determine_resume_path` to check that all ranks find the same directory.

    Ray's driver has no checkpoint manager: it looks once for all ranks, so nothing is compared there.
    """

    @functools.wraps(original)
    def determine_resume_path(handler: Any) -> Any:
        manager = getattr(handler.engine, "checkpoint_mananager", None)
        if not getattr(manager, "use_megatron_fsdp", False):
            return original(handler)
        return _agree(manager, lambda: original(handler))

    return determine_resume_path


def _agree(manager: Any, look: Callable[[], Any]) -> Any:
    """What all ranks find, if they find the same.

    Args:
        manager: VeRL's `MegatronCheckpointManager`.
        look: Returns what this rank finds.

    Raises:
        NotACheckpointError: The ranks find different things.
    """
    from mbridge_fsdp_ckpt.integrations.common.root import same_on_all_ranks
    from mbridge_fsdp_ckpt.remedies import Frontend, through

    choice = choice_of(manager.checkpoint_config)
    if choice is None:
        return look()
    with through(Frontend.VERL):
        return same_on_all_ranks(look, lambda path: path or "no checkpoint", choice.settings)


def _existing(local_path: str) -> str:
    if not Path(local_path).is_dir():
        raise NotACheckpointError(
            expected="the directory of a step of VeRL",
            found="no such directory",
            remedy="Give a path that leads to the same shared directory on every host.",
            key=local_path,
        )
    return local_path


def _wrap_load_fsdp_checkpoint(module: Any, original: _Method) -> _Method:
    """Wrap `_load_megatron_fsdp_checkpoint` to load our runs with this package.

    It ignores `del_local_after_load`, which deletes the local copy of a remote file: VeRL copies no directories.
    """

    @functools.wraps(original)
    def load(manager: Any, local_path: str, del_local_after_load: bool = False) -> Any:
        choice = choice_of(manager.checkpoint_config)
        if choice is None:
            return original(manager, local_path, del_local_after_load=del_local_after_load)
        from mbridge_fsdp_ckpt.integrations.verl.manager import Export, load

        export = Export(module.get_hf_model_checkpoint_path(local_path), manager._load_model_as_hf_via_bridge)
        return load(manager, module.get_model_dist_checkpoint_path(local_path), export, choice.settings)

    return load


def _wrap_dispatch_finalize(original: _Method) -> _Method:
    """Wrap `_dispatch_finalize` to call VeRL's own bookkeeping once our asynchronous save is committed."""

    @functools.wraps(original)
    def dispatch(manager: Any, async_requests: Any, finalize_save_fn: Callable[[], None]) -> Any:
        if choice_of(manager.checkpoint_config) is not None and manager.checkpoint_config.async_save:
            from mbridge_fsdp_ckpt.integrations.verl.asynchronous import hand_over

            if hand_over(manager, finalize_save_fn):
                return None
        return original(manager, async_requests, finalize_save_fn)

    return dispatch


def _wrap_save_checkpoint(original: _Method) -> _Method:
    """Wrap `MegatronEngine.save_checkpoint` to save asynchronously where VeRL asks for it.

    It raises an error of the previous save only after the new one, and waits for the last save of a run.
    """

    @functools.wraps(original)
    def save_checkpoint(
        engine: Any, local_path: str, hdfs_path: str | None = None, global_step: int = 0, *others: Any, **named: Any
    ) -> None:
        manager = engine.checkpoint_mananager
        if choice_of(manager.checkpoint_config) is None or not manager.checkpoint_config.async_save:
            original(engine, local_path, hdfs_path, global_step, *others, **named)
            return
        from mbridge_fsdp_ckpt.integrations.verl import asynchronous
        from mbridge_fsdp_ckpt.saving.background.async_saves import async_saves

        asynchronous.keep_to_actors(manager, local_path)
        with async_saves().old_error_last():  # not before VeRL has handed over what follows the new save
            try:
                original(engine, local_path, hdfs_path, global_step, *others, **named)
            except BaseException:
                asynchronous.hand_over(manager, None)
                raise
            if asynchronous.is_last(engine, global_step):
                asynchronous.finish(manager)

    return save_checkpoint


def _wrap_offload(original: _Method) -> _Method:
    """Wrap an offload function to wait until an asynchronous save has copied its tensors.

    It waits for every engine: engines may share tensors, and another one may be the one that is saved.
    """

    @functools.wraps(original)
    def move(moved: Any) -> Any:
        from mbridge_fsdp_ckpt.saving.background.async_saves import async_saves

        async_saves().wait_until_taken()
        return original(moved)

    return move


def _wrap_update_weights(original: _Method) -> _Method:
    """Wrap `ActorRolloutRefWorker.update_weights` to free staging memory first, for the rollout that it wakes.

    A rollout on another host, to which weights are sent by another mode, needs no memory of this host.
    """
    if not inspect.iscoroutinefunction(original):
        return original

    @functools.wraps(original)
    async def update_weights(worker: Any, *args: Any, **named: Any) -> Any:
        ours = sys.modules.get("mbridge_fsdp_ckpt.checkpoint")  # where nothing has been saved, nothing is loaded
        if ours is not None and named.get("mode", "auto") in ("auto", "naive"):
            ours.release_staging(wait=False)
        return await original(worker, *args, **named)

    return update_weights


def _wrap_build_optimizer(original: _Method) -> _Method:
    """Wrap `MegatronEngine._build_optimizer` to check versions and to call `bridge.register()` first for our runs."""

    @functools.wraps(original)
    def build_optimizer(engine: Any) -> Any:
        choice = choice_of(engine.checkpoint_config)
        if choice is not None and (engine.engine_config.use_megatron_fsdp or not choice.by_takeover):
            _require()
            _register()
        return original(engine)

    return build_optimizer


def _register() -> None:
    """Register the plug-in for Bridge, which corrects Megatron-Core and Bridge under Megatron-FSDP."""
    global _has_registered
    from mbridge_fsdp_ckpt.integrations.bridge import register

    register()
    _has_registered = True
