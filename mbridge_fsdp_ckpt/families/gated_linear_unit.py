# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Gated linear units: linear_fc1 holds the gate and the up projection, one above the other."""

from __future__ import annotations

import re

from mbridge_fsdp_ckpt.errors import FamilyError
from mbridge_fsdp_ckpt.families.declaration import ParameterContext, Segment

_FC1_LEAF = re.compile(r"(weight|bias)\d*")


class GatedLinearUnitFamily:
    """`linear_fc1.{weight,bias}` of dense, shared and sequential MLPs, `linear_fc1.{weight,bias}N` of grouped experts.

    The MLP's config decides, not the model's: a vision encoder without gates may sit beside a gated decoder.
    Suffixes are those of Megatron-Core's `handle_swiglu_in_state_dict`: `_w` the gate, `_v` the up projection.
    """

    name = "gated_linear_unit"
    version = 1

    def segments(self, parameter: ParameterContext) -> tuple[Segment, ...] | None:
        """Gate and up, half the rows each."""
        if parameter.child_name(0) != "linear_fc1" or not _FC1_LEAF.fullmatch(parameter.leaf):
            return None
        config = getattr(parameter.ancestor(1), "config", None)
        if not getattr(config, "gated_linear_unit", False):
            return None
        rows = parameter.local_shape[0]
        if rows % 2:
            raise FamilyError(
                expected="an even number of rows: gate and up",
                found=f"shape {parameter.local_shape}",
                remedy="Is gated_linear_unit set for a layer that is not gated?",
                key=parameter.name,
            )
        return _segments(rows // 2, _interleave(config, parameter), parameter.name)


def _interleave(config: object, parameter: ParameterContext) -> int | None:
    """Rows of gate that are followed by as many of up, where Megatron-Core interleaves them in memory.

    megatron-core's `TransformerConfig` documents one setting for grouped experts and one for shared experts that run
    as a grouped GEMM; other layers read halves.
    """
    size = None
    if ".shared_experts." in parameter.name:
        if getattr(config, "use_grouped_gemm_for_shared_expert", False):
            size = getattr(config, "moe_shared_expert_glu_interleave_size", None)
    elif ".experts.linear_fc1." in parameter.name:
        size = getattr(config, "moe_mlp_glu_interleave_size", None)
    return int(size) if size else None


def _segments(half: int, interleave: int | None, name: str) -> tuple[Segment, ...]:
    if interleave is None:
        return Segment("_w", half), Segment("_v", half)
    if half % interleave:
        raise FamilyError(
            expected=f"{half} rows of gate to be a multiple of the interleave size",
            found=f"interleave size {interleave}",
            remedy="Choose an interleave size that divides the local ffn_hidden_size.",
            key=name,
        )
    return (Segment("_w", interleave), Segment("_v", interleave)) * (half // interleave)
