# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The tensors of FP8 state with delayed scaling, as `state` describes them: their names, and how their shapes agree."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

WAYS = {"fwd": 3, "bwd": 2}
"""Quantized tensors a GEMM."""

TENSORS = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
"""The shapes of one module's state."""


def is_regular(tensors: Mapping[str, object]) -> bool:
    """Whether these are float32 tensors of one number of GEMMs and one length of history."""
    found = shapes_of(tensors)
    if found.keys() != set(TENSORS) or () in found.values() or not math.prod(found["amax_history_fwd"]):
        return False
    gemms, length = found["scale_fwd"][0] // WAYS["fwd"], found["amax_history_fwd"][0]
    scales = {f"scale_{way}": (gemms * n,) for way, n in WAYS.items()}
    return found == scales | {f"amax_history_{way}": (length, gemms * n) for way, n in WAYS.items()}


def shapes_of(tensors: object) -> dict[str, tuple[int, ...]]:
    """Shapes of float32 tensors; what else is there has ()."""
    fields = tensors if isinstance(tensors, Mapping) else {}
    fits = {name: isinstance(t, torch.Tensor) and t.dtype == torch.float32 for name, t in fields.items()}
    return {name: tuple(fields[name].shape) if fits[name] else () for name in fields if name != "recipe"}
