# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Refusals of models that cannot be saved or filled, with errors that name why, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mbridge_fsdp_ckpt.errors import ConfigurationError, UnsupportedStateError
from mbridge_fsdp_ckpt.remedies import remedy

Parameters = Mapping[str, torch.Tensor]


_SECOND_VERSION = "megatron_fsdp.experimental"
"""The package that Megatron-FSDP v2 mixes classes of into the modules that it shards."""


def refuse_second_version(model: Any) -> None:
    """Refuse a model under Megatron-FSDP v2, which has no wrapper that could be found.

    Raises:
        ConfigurationError: It is one.
    """
    chunks = model if isinstance(model, list | tuple) else [model]
    modules = (module for chunk in chunks if isinstance(chunk, torch.nn.Module) for module in chunk.modules())
    if any(_SECOND_VERSION in kind.__module__ for module in modules for kind in type(module).__mro__):
        raise ConfigurationError(
            expected="a model under Megatron-FSDP v1",
            found=f"a model under Megatron-FSDP v2 ({_SECOND_VERSION})",
            remedy="Version 2 is not supported yet. Train with version 1.",
        )


def described(model: Any) -> str:
    """What a caller passed as a model."""
    return type(model).__name__ + (f" of {len(model)}" if isinstance(model, list | tuple) else "")


def refuse_strangers(fsdp_module: Any, known: tuple[Parameters, Parameters]) -> None:
    """Refuse parameters that Megatron-FSDP does not know: neither shards, nor optimizer, nor gradients have them.

    Args:
        fsdp_module: A `MegatronFSDP` module.
        known: Its parameters, those that the optimizer updates and those that compute.

    Raises:
        ConfigurationError: One came to the model after it was wrapped, or took another one's place.
    """
    if not known[0]:
        return
    there = {id(parameter) for parameters in known for parameter in parameters.values()}
    for name, parameter in fsdp_module.named_parameters():
        if id(parameter) not in there:
            raise ConfigurationError(
                expected="the parameters that the model had when Megatron-FSDP wrapped it",
                found=f"a parameter of shape {list(parameter.shape)} that was added or replaced since: it is not "
                "sharded, and not trained",
                remedy="Add adapters and replace layers before the model is wrapped, and build the optimizer after it.",
                key=name,
            )


def refuse_values(state: Mapping[str, Any]) -> None:
    """Refuse what a state dict has beside tensors.

    Args:
        state: A state dict, without what `get_extra_state` returned.

    Raises:
        UnsupportedStateError: Something is no tensor.
    """
    for name, value in state.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise UnsupportedStateError(
                expected="tensors in the model's state dict, and other state from get_extra_state",
                found=type(value).__name__,
                remedy="Let the module return it from get_extra_state and take it back in set_extra_state.",
                key=name,
            )


def refuse_unreadable(shard: torch.Tensor, key: str) -> None:
    """Refuse a tensor whose elements do not lie in memory as they are.

    A weight that is kept in FP8 alone is one: its values change with its scale, which no state dict has; where there is
    a main weight, that is the parameter.  Megatron-FSDP 0.19 cannot shard such a weight: only `no_shard` meets it,
    where it is frozen.

    Raises:
        UnsupportedStateError: It is sparse, or one of Transformer Engine's quantized tensors.
    """
    if hasattr(shard, "quantize_"):
        raise UnsupportedStateError(
            expected="a weight of high precision, or one whose main weight is",
            found=f"{type(shard).__name__} without a main weight: frozen",
            remedy=remedy("Keep frozen weights in bf16.", "Set {no_fp8_weights}.", "Or leave them out with {include}."),
            key=key,
        )
    if shard.layout is not torch.strided:
        raise UnsupportedStateError(
            expected="a dense tensor",
            found=f"a tensor of layout {shard.layout} and shape {list(shard.shape)}",
            remedy=remedy(
                "Register the buffer with .to_dense(), or as persistent=False if it can be made again.",
                "Or leave it out with {include}.",
            ),
            key=key,
        )
