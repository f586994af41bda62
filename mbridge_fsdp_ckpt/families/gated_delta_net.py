# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet (Qwen3-Next, Qwen3.5): in_proj holds six projections, conv1d three."""

from __future__ import annotations

from typing import Any

from mbridge_fsdp_ckpt.families.declaration import ParameterContext, Segment


class GatedDeltaNetFamily:
    """`in_proj.{weight,bias}` and `conv1d.{weight,bias}` of Megatron-Core's `GatedDeltaNet`.

    Names and rows are the module's own (`in_proj_split_names`, `in_proj_split_sections`: rows of one TP rank; none
    of these in 0.18), the suffixes those of its `sharded_state_dict`.  Transformer Engine's fused layer norm inside
    in_proj is not split.
    """

    name = "gated_delta_net"
    version = 1

    def segments(self, parameter: ParameterContext) -> tuple[Segment, ...] | None:
        """The projections in the module's order."""
        layer: Any = parameter.ancestor(1)
        if parameter.leaf not in ("weight", "bias") or not hasattr(layer, "qk_dim_local_tp"):
            return None
        match parameter.child_name(0):
            case "in_proj":
                return _in_proj(layer)
            case "conv1d":
                rows = layer.qk_dim_local_tp, layer.qk_dim_local_tp, layer.v_dim_local_tp
                return _named(("query", "key", "value"), rows)
        return None


def _in_proj(layer: Any) -> tuple[Segment, ...]:
    if hasattr(layer, "in_proj_split_sections"):
        return _named(layer.in_proj_split_names, layer.in_proj_split_sections)
    qk, v, heads = layer.qk_dim_local_tp, layer.v_dim_local_tp, layer.num_v_heads_local_tp
    return _named(("query", "key", "value", "z", "beta", "alpha"), (qk, qk, v, v, heads, heads))


def _named(names: Any, rows: Any) -> tuple[Segment, ...]:
    return tuple(Segment(f".{name}", int(count)) for name, count in zip(names, rows, strict=True))
