# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`register()`: `megatron.training` learns `--ckpt-format fsdp_dtensor_safe`.

Megatron-LM has no plug-in point for checkpoints.  These are replaced, here and nowhere else, each as soon as its
module is imported, and only act for our format name:

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
from mbridge_fsdp_ckpt.integrations.common.options import forget, tell
from mbridge_fsdp_ckpt.integrations.common.own_name import refusing_as
from mbridge_fsdp_ckpt.integrations.megatron_lm.choice import check_arguments, use
from mbridge_fsdp_ckpt.integrations.megatron_lm.options import learn
from mbridge_fsdp_ckpt.patching import Patches, rebind_everywhere
from mbridge_fsdp_ckpt.settings import Settings
from mbridge_fsdp_ckpt.upstream_fixes import corrections
from mbridge_fsdp_ckpt.versions import require

_patches = Patches()
_hook: AfterImport | None = None


def register(settings: Settings | None = None) -> None:
    """Make `--ckpt-format fsdp_dtensor_safe` work in scripts that call `megatron.training.pretrain`.

    Imports nothing: `megatron.training` is changed when the script imports it, or at once if it has.  Calling it again
    changes nothing but the settings, and these only if some are given.

    Raises:
        UnsupportedVersionError: On the import of `megatron.training`: what this needs of it is not there.
    """
    global _hook
    if settings is not None:
        use(settings)
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
    """Put everything back as it was.  Does nothing unless registered."""
    global _hook
    if _hook is not None:
        _hook.uninstall()
        _patches.undo()
        corrections.withdraw(__name__)
        use(Settings())
        forget()
        _hook = None


def _patch_checkpointing(module: ModuleType) -> None:
    require("save and load", "corrections", "random states", "Megatron-LM")
    corrections.apply(__name__)
    finalize = sys.modules[f"{module.__package__}.async_utils"].maybe_finalize_async_save  # imported by that module
    stock = (module.save_checkpoint, module.load_checkpoint, finalize)
    borrow = module.load_args_from_checkpoint
    replaced = [(function, _routed(function)) for function in stock]
    rebind_everywhere(_patches, [*replaced, (borrow, _not_borrowing(borrow))])


def _patch_arguments(module: ModuleType) -> None:
    require("Megatron-LM's arguments")
    add, validate = module.add_megatron_arguments, module.validate_args
    rebind_everywhere(_patches, [(add, _widened(add)), (validate, _validating(validate))])


def _patch_yaml(module: ModuleType) -> None:
    require("Megatron-LM's arguments in YAML")
    rebind_everywhere(_patches, [(module.validate_yaml, _validating_yaml(module.validate_yaml))])


def _routed(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Call ours of the same name for our format, Megatron-LM's otherwise."""

    @functools.wraps(stock)
    def routed(*args: Any, **kwargs: Any) -> Any:
        require("megatron.training")
        from megatron.training import get_args

        from mbridge_fsdp_ckpt.integrations.megatron_lm import checkpointing  # imports the module that is being patched

        ours = get_args().ckpt_format == FORMAT_NAME
        return (getattr(checkpointing, stock.__name__) if ours else stock)(*args, **kwargs)

    return routed


def _not_borrowing(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A script may ask for it with its defaults, without the option."""

    @functools.wraps(stock)
    def load_args_from_checkpoint(args: argparse.Namespace, *others: Any, **named: Any) -> Any:
        if getattr(args, "ckpt_format", None) != FORMAT_NAME:
            return stock(args, *others, **named)
        check_arguments(argparse.Namespace(**vars(args) | {"use_checkpoint_args": True}))  # which raises
        return args

    return load_args_from_checkpoint


def _widened(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = stock(parser)
        for action in parser._actions:
            if action.dest == "ckpt_format" and action.choices is not None and FORMAT_NAME not in action.choices:
                action.choices = [*action.choices, FORMAT_NAME]
        learn(parser)
        return parser

    return add_megatron_arguments


def _validating(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def validate_args(args: argparse.Namespace, *others: Any, **named: Any) -> Any:
        if args.ckpt_format != FORMAT_NAME:
            return stock(args, *others, **named)
        tell(check_arguments(args))
        args.verify_integrity = False  # always done, but stock's configuration refuses it
        beside = args.async_save
        args.ckpt_format, args.async_save = STOCK_FORMAT, False  # stock would drop it, for want of its own process
        try:
            with refusing_as(FORMAT_NAME):
                return stock(args, *others, **named)
        finally:
            args.ckpt_format, args.async_save = FORMAT_NAME, beside
            args.use_persistent_ckpt_worker = False  # that process, which nothing would be given to

    return validate_args


def _validating_yaml(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Stock compares no format name there, and drops nothing."""

    @functools.wraps(stock)
    def validate_yaml(args: Any, *others: Any, **named: Any) -> Any:
        if getattr(args, "ckpt_format", None) == FORMAT_NAME:
            tell(check_arguments(args))
            args.verify_integrity = args.use_persistent_ckpt_worker = False
        return stock(args, *others, **named)

    return validate_yaml
