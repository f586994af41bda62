# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Layers for Bridge's models that compute on CPU ranks, with the parameter names of Transformer Engine's layers.

Bridge finds a Hugging Face weight's place by those names, and its slicing by the class names below.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from testing import models


class RMSNorm(torch.nn.Module):
    """Called like Megatron's norm builders; the weight may be stored as its distance from one."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps, self.shift = eps, 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normalized(x, self.weight, self.shift, self.eps)


def normalized(x: torch.Tensor, weight: torch.Tensor, shift: float, eps: float) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * (weight.float() + shift)).to(x.dtype)


class LayerNormColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]  # megatron-core is untyped
    """A linear layer with the norm before it inside, as Transformer Engine fuses them."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps, self.shift = config.layernorm_epsilon, 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(normalized(x, self.layer_norm_weight, self.shift, self.eps), *args, **kwargs)


def dense_layers(config: Any) -> Any:
    """Megatron's own layers, with the names of its own: Bridge knows a Llama's under both."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(normalization="RMSNorm")


def qwen35_layers(config: Any) -> Any:
    """Megatron's own attention, Gated DeltaNet and experts, in the order that the configuration asks for."""
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    def layer(*, linear: bool) -> Any:
        spec = models.layer(config)
        parts = spec.submodules
        parts.input_layernorm, parts.pre_mlp_layernorm = IdentityOp, RMSNorm
        if linear:
            parts.self_attention = models.gated_delta_net(LayerNormColumnParallelLinear, norm=RMSNorm)
        else:
            attention = parts.self_attention.submodules
            attention.linear_qkv = LayerNormColumnParallelLinear
            attention.q_layernorm = attention.k_layernorm = RMSNorm
        return spec

    layers = [layer(linear=bool(linear)) for linear in get_linear_attention_pattern(config)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)
