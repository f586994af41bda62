# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a family may look at: a parameter's name, the modules around it, and how Megatron-Core marks it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mbridge_fsdp_ckpt.families.declaration import ParameterContext


def context_of(name: str, modules: Mapping[str, Any], parameter: Any) -> ParameterContext:
    """What a family may look at; adapters' wrapping of a layer (`to_wrap`) is not seen.

    Args:
        name: The parameter's dotted name.
        modules: The model's modules by dotted name.
        parameter: The parameter of one tensor-parallel rank, before data-parallel sharding; or a DTensor of it.
    """
    path, ancestors = name, []
    while path:
        path = path.rpartition(".")[0]
        if path.endswith(".to_wrap"):
            ancestors.append((path.removesuffix(".to_wrap"), modules[path]))
            path = path.removesuffix(".to_wrap")
        else:
            ancestors.append((path, modules[path]))
    leaf = name.rpartition(".")[2]
    seen = ".".join(filter(None, (ancestors[0][0], leaf)))
    shape = tuple(getattr(parameter, "_local_tensor", parameter).shape)
    return ParameterContext(seen, tuple(ancestors), shape, _fused(parameter))


def _fused(parameter: Any) -> str:
    """How Megatron-Core marks a parameter of several components (`partition_stride`, `partition_sizes`)."""
    stride, sizes = getattr(parameter, "partition_stride", 1), getattr(parameter, "partition_sizes", ())
    if len(sizes) > 1:
        return f"partition_sizes {list(sizes)}"
    return f"partition_stride {stride}" if stride > 1 else ""


def is_vocabulary(context: ParameterContext) -> bool:
    """Rows of tokens: Megatron-Core's `VocabParallelEmbedding`, and a language model's `output_layer`."""
    owner = context.ancestor(0)
    return hasattr(owner, "vocab_start_index") or context.child_name(0) == "output_layer"
