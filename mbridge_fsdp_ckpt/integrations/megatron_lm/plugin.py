# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`register()`: `megatron.training` learns `--ckpt-format fsdp_dtensor_safe`.

Megatron-LM has no plug-in point for checkpoints.  These are replaced, here and nowhere else, each as soon as its
module is imported, and only act for our format name (and, where a user asks for a takeover, for the stock one):

    checkpointing.save_checkpoint, load_checkpoint    called by the training loop, which imports them by name
    checkpointing.load_args_from_checkpoint           refused: called for --use-checkpoint-args, before the arguments
                                                      are validated
    async_utils.maybe_finalize_async_save             called by it before every iteration, and at the end
    arguments.add_megatron_arguments                  knows the format names by heart
    arguments.validate_args                           wants fsdp_dtensor for Megatron-FSDP, and a process of stock's for
                                                      --async-save
    yaml_arguments.validate_yaml                      called in its place with --yaml-cfg

megatron-core itself is corrected in `upstream_fixes.corrections`.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mbridge_fsdp_ckpt.format.names import FORMAT_NAME, STOCK_FORMAT
from mbridge_fsdp_ckpt.integrations.common.after_import import AfterImport
from mbridge_fsdp_ckpt.integrations.common.options import forget, warn_once
from mbridge_fsdp_ckpt.integrations.common.own_name import naming_format_in_errors
from mbridge_fsdp_ckpt.integrations.megatron_lm.choice import check_arguments, is_ours, use
from mbridge_fsdp_ckpt.integrations.megatron_lm.options import learn
from mbridge_fsdp_ckpt.patching import Patches, rebind_everywhere
from mbridge_fsdp_ckpt.settings import Settings
from mbridge_fsdp_ckpt.upstream_fixes import corrections
from mbridge_fsdp_ckpt.versions import require

_patches = Patches()
_hook: AfterImport | None = None


def register(settings: Settings | None = None, *, takeover: bool | None = None) -> None:
    """Make `--ckpt-format fsdp_dtensor_safe` work in scripts that call `megatron.training.pretrain`.

    Imports nothing of Megatron-LM: `megatron.training` is changed when the script imports it, or at once if it has.  A
    second call changes only what it is given.

    Args:
        settings: The settings of every save and load of `megatron.training`.  None keeps those in use, at first the
            defaults.
        takeover: Whether runs with `--ckpt-format fsdp_dtensor` are saved and loaded by this package, too.  None means
            what the environment variable MBRIDGE_FSDP_CKPT_TAKEOVER says.

    Raises:
        UnsupportedVersionError: When `megatron.training` is imported: it lacks a name that this package uses.
        ConfigurationError: The environment variable is neither 0 nor 1.
    """
    global _hook
    if takeover is None and _hook is None:
        from mbridge_fsdp_ckpt.integrations.bridge.choice import takeover_by_environment

        takeover = takeover_by_environment()
    use(settings, takeover=takeover)
    if _hook is None:
        hook = AfterImport(
            {
                "megatron.training.checkpointing": _patch_checkpointing,
                "megatron.training.arguments": _patch_arguments,
                "megatron.training.yaml_arguments": _patch_yaml,
            }
        )
        hook.install()
        _hook = hook


def unregister() -> None:
    """Restore every function that `register` replaced.  Does nothing unless registered."""
    global _hook
    if _hook is not None:
        _hook.uninstall()
        _patches.undo()
        corrections.withdraw(__name__)
        use(Settings(), takeover=False)
        forget()
        _hook = None


def _patch_checkpointing(module: ModuleType) -> None:
    require("save and load", "corrections", "random states", "Megatron-LM")
    corrections.apply(__name__)
    finalize = sys.modules[f"{module.__package__}.async_utils"].maybe_finalize_async_save  # imported by that module
    originals = (module.save_checkpoint, module.load_checkpoint, finalize)
    load_args = module.load_args_from_checkpoint
    replaced = [(function, _routed(function)) for function in originals]
    rebind_everywhere(_patches, [*replaced, (load_args, _wrap_load_args(load_args))])


def _patch_arguments(module: ModuleType) -> None:
    require("Megatron-LM's arguments")
    add, validate = module.add_megatron_arguments, module.validate_args
    rebind_everywhere(_patches, [(add, _wrap_add_arguments(add)), (validate, _wrap_validate_args(validate))])


def _patch_yaml(module: ModuleType) -> None:
    require("Megatron-LM's arguments in YAML")
    rebind_everywhere(_patches, [(module.validate_yaml, _wrap_validate_yaml(module.validate_yaml))])


def _routed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of Megatron-LM to call this package's function of the same name where the run is ours."""

    @functools.wraps(original)
    def routed(*args: Any, **kwargs: Any) -> Any:
        require("megatron.training")
        from megatron.training import get_args

        from mbridge_fsdp_ckpt.integrations.megatron_lm import checkpointing  # imports the module that is being patched

        function = getattr(checkpointing, original.__name__) if is_ours(get_args().ckpt_format) else original
        return function(*args, **kwargs)

    return routed


def _wrap_load_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `load_args_from_checkpoint` to refuse `--use-checkpoint-args` where the run is ours.

    A script may set `use_checkpoint_args` among its defaults, so that the option itself is not given.
    """

    @functools.wraps(original)
    def load_args_from_checkpoint(args: argparse.Namespace, *others: Any, **named: Any) -> Any:
        if not is_ours(getattr(args, "ckpt_format", None)):
            return original(args, *others, **named)
        check_arguments(argparse.Namespace(**vars(args) | {"use_checkpoint_args": True}))  # which raises
        return args

    return load_args_from_checkpoint


def _wrap_add_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `add_megatron_arguments` to add this format's name to the choices of `--ckpt-format`."""

    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original(parser)
        for action in parser._actions:
            if action.dest == "ckpt_format" and action.choices is not None and FORMAT_NAME not in action.choices:
                action.choices = [*action.choices, FORMAT_NAME]
        learn(parser)
        return parser

    return add_megatron_arguments


def _wrap_validate_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `validate_args` to check the options of our runs, and to let Megatron-LM validate them as stock's.

    Afterwards the run has this format's name, also where it was taken over.
    """

    @functools.wraps(original)
    def validate_args(args: argparse.Namespace, *others: Any, **named: Any) -> Any:
        given = args.ckpt_format
        if not is_ours(given):
            return original(args, *others, **named)
        warn_once(check_arguments(args))
        args.verify_integrity = False  # always done, but stock's configuration refuses it
        is_async = args.async_save
        args.ckpt_format, args.async_save = STOCK_FORMAT, False  # stock would drop it, for want of its own process
        try:
            with naming_format_in_errors(given):
                return original(args, *others, **named)
        finally:
            args.ckpt_format, args.async_save = FORMAT_NAME, is_async
            args.use_persistent_ckpt_worker = False  # stock's process, which our saves do not use

    return validate_args


def _wrap_validate_yaml(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `validate_yaml` to check the options of our runs.

    Unlike `validate_args`, it compares no format names and drops no option, so it validates our name as it is.
    """

    @functools.wraps(original)
    def validate_yaml(args: Any, *others: Any, **named: Any) -> Any:
        if is_ours(getattr(args, "ckpt_format", None)):
            warn_once(check_arguments(args))
            args.ckpt_format = FORMAT_NAME
            args.verify_integrity = args.use_persistent_ckpt_worker = False
        return original(args, *others, **named)

    return validate_yaml
