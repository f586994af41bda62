# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What becomes of each field of Bridge's `CheckpointConfig`, and of settings elsewhere that concern checkpoints."""

from __future__ import annotations

from typing import Any

from mbridge_fsdp_ckpt.integrations.common import without_effect as why
from mbridge_fsdp_ckpt.integrations.common.options import RERUN, Given, Handling, Option, given_by

MANAGER = "mbridge_fsdp_ckpt.integrations.bridge.manager.SafeCheckpointManager"
"""What `checkpoint.custom_manager_class` is set to."""

_UNREAD = "Bridge reads it nowhere, whatever the format."
_LOOP = "Bridge's training loop reads it."
_EXPORT = "Only `checkpoint.also_save_hf_checkpoint` reads it, which is refused."
_V1 = "Train with version 1: ddp.megatron_fsdp_version=1."


def _obeyed(text: str, *names: str, since: str = "") -> tuple[Option, ...]:
    return tuple(Option(f"checkpoint.{name}", Handling.OBEYED, text, since=since) for name in names)


def _no_effect(text: str, *names: str, since: str = "", until: str = "") -> tuple[Option, ...]:
    return tuple(Option(f"checkpoint.{name}", Handling.NO_EFFECT, text, since=since, until=until) for name in names)


def _is_without_type(cfg: Any) -> bool:
    checkpoint = cfg.checkpoint
    return bool(checkpoint.non_persistent_save_interval) and checkpoint.non_persistent_ckpt_type is None


OPTIONS = (
    *_obeyed(_LOOP, "save_interval"),
    *_obeyed("Where saves go.", "save"),
    *_obeyed("Where a run resumes from.", "load"),
    *_obeyed("What is saved.", "save_optim", "save_rng"),
    *_obeyed("Tokenizer files are part of the same commit.", "save_tokenizer_assets"),
    *_obeyed("What is loaded.", "load_optim", "load_rng", "finetune"),
    *_obeyed(
        "Weights to begin with: a checkpoint of this format or of stock; Bridge reads those of Hugging Face.",
        "pretrained_checkpoint",
    ),
    *_obeyed(
        "Where a directory of Hugging Face is named by `checkpoint.pretrained_checkpoint`.",
        "hf_trust_remote_code",
        since="megatron-bridge 0.6",
    ),
    *_obeyed("Which iteration is loaded.", "ckpt_step"),
    *_obeyed(
        "Where there is no checkpoint, the run ends instead of starting from random weights.",
        "exit_on_missing_checkpoint",
    ),
    Option(
        "checkpoint.most_recent_k",
        Handling.OBEYED,
        "Older checkpoints are removed after the commit; -1 keeps all.",
        when=lambda cfg: cfg.checkpoint.most_recent_k is None,
        remedy="Set checkpoint.most_recent_k=-1.",
    ),
    *_obeyed("A process beside each rank writes while training goes on.", "async_save"),
    *_obeyed("This package's format where it says so, or by takeover.", "ckpt_format"),
    *_obeyed(
        "Always: a load checks what it reads, by `Settings.verify`. Bridge's constructor refuses it with any format "
        "but `torch_dist`.",
        "verify_integrity",
    ),
    Option(
        "checkpoint.non_persistent_save_interval",
        Handling.OBEYED,
        _LOOP + " Refused without a type: such a checkpoint would not be found again.",
        when=_is_without_type,
        remedy="Set checkpoint.non_persistent_ckpt_type='global'.",
    ),
    Option(
        "checkpoint.non_persistent_ckpt_type",
        Handling.OBEYED,
        "'global' alone; 'local' and 'in_memory' are refused.",
        when=lambda cfg: cfg.checkpoint.non_persistent_ckpt_type not in (None, "global"),
        remedy="Use 'global', or another ckpt_format.",
    ),
    *_obeyed("Where non-persistent checkpoints go.", "non_persistent_global_ckpt_dir"),
    Option(
        "checkpoint.custom_manager_class",
        Handling.REFUSED,
        "It is how this package is plugged in.",
        when=lambda cfg: cfg.checkpoint.custom_manager_class not in (None, MANAGER),
        remedy="Remove that setting, or use another ckpt_format.",
    ),
    Option(
        "checkpoint.also_save_hf_checkpoint",
        Handling.REFUSED,
        "Bridge exports under Megatron-FSDP in no format.",
        remedy="Export checkpoints with `mbridge_fsdp_ckpt convert export`.",
        since="megatron-bridge 0.6",
    ),
    *_no_effect(_EXPORT, "hf_source_path", "hf_distributed_save", "hf_save_every_n_ranks", since="megatron-bridge 0.6"),
    *_no_effect(
        _UNREAD,
        "save_params_interval",
        "save_activations_interval",
        "save_tokens_per_expert_interval",
        "save_wgrads_interval",
        "save_dgrads_interval",
    ),
    *_no_effect(_UNREAD + " `checkpoint.most_recent_k` keeps the last ones.", "save_retain_interval"),
    *_no_effect(
        _UNREAD, "use_checkpoint_args", "use_mp_args_from_checkpoint_args", "use_tokenizer_model_from_checkpoint_args"
    ),
    *_no_effect(_UNREAD + " `mbridge_fsdp_ckpt convert` converts.", "ckpt_convert_format", "ckpt_convert_save"),
    *_no_effect(why.FULLY_PARALLEL_SAVE, "fully_parallel_save"),
    *_no_effect(why.FULLY_PARALLEL_LOAD, "fully_parallel_load"),
    Option(
        "checkpoint.async_strategy",
        Handling.NO_EFFECT,
        f"{why.PROCESS} There is no warning, because Bridge changes it by itself.",
        when=lambda cfg: False,
    ),
    Option(
        "checkpoint.strict_fsdp_dtensor_load",
        Handling.NO_EFFECT,
        f"{why.STRICT} There is no warning: `True` is what happens, and `False` is Bridge's default.",
        when=lambda cfg: False,
    ),
    *_no_effect(why.PROCESS, "async_write_results_mp_mode"),
    *_no_effect("Each rank writes its share by itself.", "storage_writers_per_rank"),
    *(option for name, text in why.WITHOUT_EFFECT.items() for option in _no_effect(text, name)),
    *_no_effect(why.STREAMED, "stream_ckpt_dequant", since=why.STREAMED_SINCE, until=why.STREAMED_UNTIL),
    *(option for name, text in why.COMING.items() for option in _no_effect(text, name, since=why.COMING_SINCE)),
    Option("rerun_state_machine.rerun_mode", Handling.IN_PART, RERUN),
    Option(
        "ddp.megatron_fsdp_version",
        Handling.REFUSED,
        "Megatron-FSDP v2 is not supported yet.",
        when=lambda cfg: cfg.ddp.megatron_fsdp_version == 2,
        remedy=_V1,
        since="megatron-core 0.20",
    ),
    Option(
        "ddp.data_parallel_sharding_strategy_experts",
        Handling.OBEYED,
        "What a rank holds is read from each parameter.",
        since="megatron-core 0.20",
    ),
)


def given(cfg: Any) -> dict[str, Given]:
    """What a `ConfigContainer` says of these; sections that it has not are left out."""
    found = given_by(cfg.checkpoint, "checkpoint.")
    named = {option.name for option in OPTIONS}
    for section in ("ddp", "rerun_state_machine"):
        owner = getattr(cfg, section, None)
        if owner is not None:
            found |= {name: value for name, value in given_by(owner, f"{section}.").items() if name in named}
    return found
