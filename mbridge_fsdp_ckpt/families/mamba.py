# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Mamba-2 (Nemotron-H): in_proj holds five projections, the convolution three."""

from __future__ import annotations

from typing import Any

from mbridge_fsdp_ckpt.families.declaration import ParameterContext, Segment


class MambaFamily:
    """`in_proj.{weight,bias}` and `conv1d_{weight,bias}` of Megatron-Core's `MambaMixer`.

    Core 0.18 has `conv1d.{weight,bias}`.  Rows are the mixer's own sizes of one TP rank; the suffixes are those of its
    `sharded_state_dict`.
    """

    name = "mamba"
    version = 1

    def segments(self, parameter: ParameterContext) -> tuple[Segment, ...] | None:
        """in_proj: z, x, B, C, dt; the convolution: x, B, C."""
        if parameter.leaf in ("conv1d_weight", "conv1d_bias"):
            mixer, names = parameter.ancestor(0), "x B C"
        elif parameter.child_name(0) == "conv1d" and parameter.leaf in ("weight", "bias"):
            mixer, names = parameter.ancestor(1), "x B C"
        elif parameter.child_name(0) == "in_proj" and parameter.leaf in ("weight", "bias"):
            mixer, names = parameter.ancestor(1), "z x B C dt"
        else:
            return None
        if not is_mixer(mixer):
            return None
        rows = _rows(mixer)
        return tuple(Segment(f".{name}", rows[name]) for name in names.split())


def is_mixer(module: Any) -> bool:
    """Whether a module is a `MambaMixer`."""
    return hasattr(module, "d_inner_local_tp")


def _rows(mixer: Any) -> dict[str, int]:
    inner, state = mixer.d_inner_local_tp, mixer.ngroups_local_tp * mixer.d_state
    return {"z": inner, "x": inner, "B": state, "C": state, "dt": mixer.nheads_local_tp}
