# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A recipe made small: the same configuration with other sizes, so that it trains in seconds on a few ranks.

Kinds of layers, module classes, kinds of parallelism, sharding, optimizer, offloading, precision and format stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SIZES = {
    "seq_length": 32,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "vocab_size": 128,
    "num_attention_heads": 8,
    "kv_channels": 16,
    "num_query_groups": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_state_dim": 8,
    "mamba_num_groups": 4,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 40,
}
_PARALLEL = ("tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")


def shrink(config: Any) -> None:
    """Make a recipe's configuration small.

    Args:
        config: Bridge's configuration; its model has not been finalized yet.
    """
    shrink_model(config.model)
    _shrink_run(config)


def shrink_model(model: Any) -> None:
    """Make Bridge's description of a model small.

    Args:
        model: The provider; it has not been finalized yet.
    """
    for name, size in _SIZES.items():
        if getattr(model, name, None):
            setattr(model, name, min(size, getattr(model, name)))
    for name in _PARALLEL:
        setattr(model, name, min(2, getattr(model, name)))
    layers = model.num_layers
    per_layer = [name for name, value in vars(model).items() if _is_per_layer(value, layers)]
    kinds = list(zip(*(getattr(model, name) for name in per_layer), strict=True)) or [()] * layers
    first, last = shortest_run_of_all_kinds(kinds)
    last = max(last, min(first + 2, layers))
    for name in per_layer:
        setattr(model, name, getattr(model, name)[first:last])
    model.num_layers = last - first
    if isinstance(model.linear_attention_freq, int):  # Bridge 0.5: every so many-th layer does not attend linearly
        model.linear_attention_freq = model.num_layers


def _is_per_layer(value: Any, layers: int) -> bool:
    """Whether a setting tells each layer's kind: a list, or a pattern of letters."""
    return isinstance(value, list | str) and len(value) == layers


def shortest_run_of_all_kinds(kinds: Sequence[Any]) -> tuple[int, int]:
    """The first and one past the last layer of the shortest run in which every kind occurs; the earliest of them.

    `M E M E M * E M E` gives `(3, 6)`: `E M *`.
    """
    wanted = set(kinds)
    runs = (
        (last - first, first, last)
        for first in range(len(kinds))
        for last in range(first + len(wanted), len(kinds) + 1)
        if set(kinds[first:last]) == wanted
    )
    _, first, last = min(runs)
    return first, last


def _shrink_run(config: Any) -> None:
    if config.tokenizer.vocab_size:  # the tokenizer of mock data
        config.tokenizer.vocab_size = config.model.vocab_size - 1
    config.dataset.seq_length, config.dataset.num_workers = config.model.seq_length, 0
    config.train.train_iters, config.train.global_batch_size = 10, 8
    config.scheduler.lr_warmup_iters = 1
    config.checkpoint.save_interval = 5
    config.logger.log_interval = 1
