# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What becomes of each checkpointing argument of `megatron.training`, and of others that concern checkpoints."""

from __future__ import annotations

import argparse
from typing import Any

from mbridge_fsdp_ckpt.integrations.common import without_effect as why
from mbridge_fsdp_ckpt.integrations.common.options import RERUN, Given, Handling, Option

GROUP = "checkpointing"
"""The title of the group that holds them, in `megatron.training.arguments`."""

_LOOP = "The training loop reads it, and writes such files itself."
_ARGS = "Only `--use-checkpoint-args` reads it, which is refused."
_REMOVE = "Remove that option."
_FLAGS = {
    "ckpt_fully_parallel_save": "--no-ckpt-fully-parallel-save",
    "ckpt_load_validate_sharding_integrity": "--no-ckpt-load-validate-sharding-integrity",
    "strict_fsdp_dtensor_load": "--no-strict-fsdp-dtensor-load",
    "stream_ckpt_dequant": "--no-stream-ckpt-dequant",
    "use_tokenizer_model_from_checkpoint_args": "--no-use-tokenizer-model-from-checkpoint-args",
    "use_dist_ckpt_deprecated": "--use-dist-ckpt",
    "dist_ckpt_format_deprecated": "--dist-ckpt-format",
    "ckpt_fully_parallel_save_deprecated": "--ckpt-fully-parallel-save",
}
"""Those that are not written as their names are."""


def _option(name: str, handling: Handling, text: str, **more: Any) -> Option:
    return Option(name, handling, text, shown=_FLAGS.get(name, "--" + name.replace("_", "-")), **more)


def _obeyed(text: str, *names: str) -> tuple[Option, ...]:
    return tuple(_option(name, Handling.OBEYED, text) for name in names)


def _refused(text: str, name: str, remedy: str = _REMOVE, **more: Any) -> Option:
    more.setdefault("when", lambda args: getattr(args, name) not in (None, False))
    return _option(name, Handling.REFUSED, text, remedy=remedy, **more)


def _no_effect(text: str, *names: str, **more: Any) -> tuple[Option, ...]:
    return tuple(_option(name, Handling.NO_EFFECT, text, **more) for name in names)


OPTIONS = (
    *_obeyed("Where saves go.", "save"),
    *_obeyed("The training loop reads it.", "save_interval"),
    *_obeyed("Where a run resumes from.", "load"),
    *_obeyed(
        _LOOP,
        "save_params_interval",
        "save_activations_interval",
        "save_tokens_per_expert_interval",
        "save_wgrads_interval",
        "save_dgrads_interval",
    ),
    *_obeyed("Checkpoints between are removed after the next commit.", "save_retain_interval"),
    *_obeyed("What is saved.", "no_save_optim", "no_save_rng"),
    *_obeyed("What is loaded.", "no_load_optim", "no_load_rng", "finetune"),
    *_obeyed("Weights to begin with, where `--load` has no checkpoint.", "pretrained_checkpoint"),
    *_obeyed("Which iteration is loaded.", "ckpt_step"),
    *_obeyed(
        "Where there is no checkpoint, the run ends instead of starting from random weights.",
        "exit_on_missing_checkpoint",
    ),
    *_obeyed("This package's format where it says so, or by takeover.", "ckpt_format"),
    *_obeyed("A process beside each rank writes while training goes on.", "async_save"),
    *_obeyed("Always: a load checks what it reads, by `Settings.verify`.", "verify_integrity"),
    _refused("Non-persistent checkpoints are not supported here.", "non_persistent_ckpt_type"),
    _refused("Non-persistent checkpoints are not supported here.", "non_persistent_save_interval"),
    *_no_effect("Non-persistent checkpoints are refused.", "non_persistent_global_ckpt_dir"),
    _refused(
        "Checkpoints of this format hold no arguments but those that Megatron-LM compares.",
        "use_checkpoint_args",
        "Give the arguments of the saving run.",
    ),
    *_no_effect(_ARGS, "use_mp_args_from_checkpoint_args", "use_tokenizer_model_from_checkpoint_args"),
    _refused("A checkpoint says itself how far training was.", "override_ckpt_iteration", since="megatron-core 0.19"),
    _refused("Training jobs do not convert.", "ckpt_convert_format", "Convert with `mbridge_fsdp_ckpt convert`."),
    *_no_effect("Only `--ckpt-convert-format` reads it, which is refused.", "ckpt_convert_save"),
    *_no_effect(why.FULLY_PARALLEL_SAVE, "ckpt_fully_parallel_save"),
    *_no_effect(why.FULLY_PARALLEL_LOAD, "ckpt_fully_parallel_load"),
    *_no_effect(why.PROCESS, "async_strategy"),
    *_no_effect(why.STRICT, "strict_fsdp_dtensor_load"),
    *(option for name, text in why.WITHOUT_EFFECT.items() for option in _no_effect(text, name)),
    *_no_effect(why.STREAMED, "stream_ckpt_dequant", since=why.STREAMED_SINCE, until=why.STREAMED_UNTIL),
    *_no_effect(
        "Deprecated: Megatron-LM says itself that it has no effect.",
        "use_dist_ckpt_deprecated",
        "dist_ckpt_format_deprecated",
        "ckpt_fully_parallel_save_deprecated",
        when=lambda args: False,
    ),
    *(option for name, text in why.COMING.items() for option in _no_effect(text, name, since=why.COMING_SINCE)),
    *_no_effect("State of modules is always saved.", "ckpt_drop_redundant_extra_state", since=why.COMING_SINCE),
    *_no_effect("Of `torch_dist`.", "save_tokenizer_assets", since=why.COMING_SINCE),
)
"""The group `GROUP`."""

ELSEWHERE = (
    _refused(
        "Logits are written by stock's process for asynchronous saves, which is not started.",
        "logits_save_dir",
        since="megatron-core 0.19",
    ),
    _option(
        "rerun_mode", Handling.IN_PART, RERUN, when=lambda args: args.rerun_mode not in ("disabled", "validate_results")
    ),
    _refused(
        "Megatron-FSDP v2 is not supported yet.",
        "megatron_fsdp_version",
        "Train with --megatron-fsdp-version 1.",
        when=lambda args: args.megatron_fsdp_version == 2,
        since="megatron-core 0.20",
    ),
    _option(
        "data_parallel_sharding_strategy_experts",
        Handling.OBEYED,
        "What a rank holds is read from each parameter.",
        since="megatron-core 0.20",
    ),
)
"""Of other groups."""

_defaults: dict[str, Any] = {}


def learn(parser: argparse.ArgumentParser) -> None:
    """Remember what a parser of Megatron-LM's has by default in the group."""
    _defaults.clear()
    for group in parser._action_groups:
        if group.title == GROUP:
            _defaults.update({action.dest: action.default for action in group._group_actions})


def given(args: argparse.Namespace) -> dict[str, Given]:
    """What the arguments say of these, and of what the group has beyond them.

    Where no parser was seen, a value is taken for the default: an option is refused by its value.
    """
    names = dict.fromkeys([*_defaults, *(option.name for option in (*OPTIONS, *ELSEWHERE))])
    there = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return {name: Given(value, _defaults.get(name, value)) for name, value in there.items()}
