# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The model of a checkpoint that Megatron-LM saved, from its arguments: data, of which nothing is called."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch

from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.integrations.bridge.without_gpu import as_if_there_was_one
from mbridge_fsdp_ckpt.io.store import AnyPath

_DATA = (bool, int, float, str, type(None), torch.dtype)
_UNSHARDED: dict[str, Any] = {
    **dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"), 1),
    **dict.fromkeys(("expert_model_parallel_size", "expert_tensor_parallel_size"), 1),
    **dict.fromkeys(("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout"), None),
    **dict.fromkeys(("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"), None),
    **dict.fromkeys(("sequence_parallel", "gradient_accumulation_fusion", "tp_comm_overlap"), False),
    **dict.fromkeys(("fp8", "fp4"), None),
    "fp8_param_gather": False,
    "moe_token_dispatcher_type": "alltoall",
    "use_cpu_initialization": True,
}
"""One process, weights in their own precision, and nothing that only a step needs."""
_RUN_CODE = ("spec", "heterogeneous_layers_config_path", "kitchen_config_file", "kitchen_recipe_number")
"""Arguments that name a module or a file: what is in those is not in the checkpoint."""
_OF_THE_OPTIMIZER = (
    *("optimizer", "lr", "min_lr", "weight_decay", "decoupled_lr", "decoupled_min_lr"),
    "apply_wd_to_qk_layernorm",
)
"""Those by which Megatron groups parameters."""


def built(arguments: Mapping[str, Any], directory: AnyPath) -> tuple[Any, Any]:
    """The model that Megatron-LM builds from its arguments, as Bridge does, and the settings of its optimizer.

    Args:
        arguments: As the checkpoint has them, read as data.
        directory: The checkpoint, for errors.

    Raises:
        ConfigurationError: They name code or a file, or a setting is not among them.
    """
    from megatron.bridge.training.mlm_compat.arguments import _transformer_config_from_args
    from megatron.bridge.training.mlm_compat.model import _gpt_provider
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.module import Float16Module

    named = [name for name in _RUN_CODE if arguments.get(name)]
    if named:
        raise ConfigurationError(
            expected="a model that Megatron-LM's arguments describe",
            found=", ".join(f"{name}={arguments[name]!r:.200}" for name in named),
            remedy="What that names is not in the checkpoint, and is not called. Go through Hugging Face, or have "
            "Megatron-Bridge load and save the checkpoint first.",
            key=str(directory),
        )
    data = {name: value for name, value in arguments.items() if _is_data(value)}
    args = argparse.Namespace(**data | {name: value for name, value in _UNSHARDED.items() if name in data})
    parallel_state.initialize_model_parallel()
    try:
        with as_if_there_was_one(), torch.device("meta"):
            config = _transformer_config_from_args(args)
            model = _gpt_provider(args, config)
    except AttributeError as error:
        if error.obj is not args:
            raise
        raise ConfigurationError(
            expected=f"{error.name} among Megatron-LM's arguments in the checkpoint",
            found="no such argument that is plain data",
            remedy="Was it saved by another version of Megatron-LM? Load and save it with the installed one.",
            key=str(directory),
        ) from error
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    if config.bf16 or config.fp16:
        model = Float16Module(config, model)
    return model, OptimizerConfig(**{name: data[name] for name in _OF_THE_OPTIMIZER if name in data})


def _is_data(value: Any) -> bool:
    """Whether it is a number, text, a dtype, or a list of such; not an enumeration's member, whose class is unknown."""
    return all(_is_data(item) for item in value) if type(value) in (list, tuple) else type(value) in _DATA
