# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""How many parameters a model has, counted on paper from Bridge's description of it."""

from __future__ import annotations

from typing import Any


def count(model: Any, experts: int | None = None) -> int:
    """Parameters of embeddings, layers and output layer, without layers for multi-token prediction.

    Args:
        model: Bridge's provider.
        experts: Routed experts to count in each layer; all of them unless given.
    """
    hidden = model.hidden_size
    counted = model.num_moe_experts if experts is None else experts
    kinds = {
        "*": _attention(model),
        "D": _gated_delta_net(model) if model.linear_attention_freq else 0,
        "M": _mamba(model) if getattr(model, "mamba_num_heads", None) else 0,
        "E": _experts(model, counted) if counted else 0,
        "-": hidden + _mlp(model, model.ffn_hidden_size or 0),
    }
    return int(hidden + 2 * model.vocab_size * hidden + sum(kinds[kind] for kind in _layers(model)))


def active(model: Any) -> int:
    """Parameters that one token meets."""
    return count(model, model.moe_router_topk) if model.num_moe_experts else count(model)


def _layers(model: Any) -> str:
    """One letter a sub-layer: attention, Gated DeltaNet, Mamba, experts, MLP."""
    if getattr(model, "hybrid_layer_pattern", None):
        return str(model.hybrid_layer_pattern)
    linear = model.linear_attention_freq or [0] * model.num_layers
    if isinstance(linear, int):  # Bridge 0.5
        linear = [layer % linear != 0 for layer in range(1, model.num_layers + 1)]
    mlp = "E" if model.num_moe_experts else "-"
    return "".join(("D" if is_linear else "*") + mlp for is_linear in linear)


def _attention(model: Any) -> int:
    query = model.num_attention_heads * model.kv_channels
    keys_and_values = 2 * model.num_query_groups * model.kv_channels
    gate = query if model.attention_output_gate else 0
    norms = model.hidden_size + (2 * model.kv_channels if model.qk_layernorm else 0)
    return int(norms + model.hidden_size * (query + gate + keys_and_values + query))


def _gated_delta_net(model: Any) -> int:
    keys = model.linear_num_key_heads * model.linear_key_head_dim
    values = model.linear_num_value_heads * model.linear_value_head_dim
    heads = model.linear_num_value_heads
    projected = 2 * keys + 2 * values + 2 * heads  # query, key, value, gate, beta, alpha
    convolution = (2 * keys + values) * model.linear_conv_kernel_dim
    norms = model.hidden_size + model.linear_value_head_dim
    return int(norms + model.hidden_size * (projected + values) + convolution + 2 * heads)


def _mamba(model: Any) -> int:
    inner = model.mamba_num_heads * model.mamba_head_dim
    states = 2 * model.mamba_num_groups * model.mamba_state_dim
    projected = 2 * inner + states + model.mamba_num_heads  # z, x, B, C, dt
    convolution = (inner + states) * (4 + 1)  # with biases
    norms, per_head = model.hidden_size + inner, 3 * model.mamba_num_heads  # A, D and the bias of dt
    return int(norms + model.hidden_size * (projected + inner) + convolution + per_head)


def _experts(model: Any, counted: int) -> int:
    router = model.num_moe_experts * model.hidden_size
    routed = counted * _mlp(model, model.moe_ffn_hidden_size)
    shared = _mlp(model, model.moe_shared_expert_intermediate_size or 0)
    gate = model.hidden_size if model.moe_shared_expert_gate else 0
    return int(model.hidden_size + router + routed + shared + gate)


def _mlp(model: Any, width: int) -> int:
    return int((3 if model.gated_linear_unit else 2) * model.hidden_size * width)
