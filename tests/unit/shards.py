# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks hold, built from literal layouts."""

import torch

from mbridge_fsdp_ckpt.families import Claim, Segment
from mbridge_fsdp_ckpt.live.local_shards import LocalShard
from mbridge_fsdp_ckpt.plan.boxes import FlatRange, Shape
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.plan.layout import Axis, ParameterLayout
from mbridge_fsdp_ckpt.plan.slices import plan_parameter


def shards(
    start: int,
    stop: int,
    *,
    key: str = "weight",
    shape: Shape = (4, 3),
    dtype: str = "float32",
    replica: tuple[int, int] = (0, 1),
    gated: bool = False,
    is_copy: bool = False,
) -> list[LocalShard]:
    """What a rank holds that has the elements [start, stop) of one parameter."""
    layout = ParameterLayout(key, key, shape, None, Axis(0, 1), FlatRange(start, stop), Axis(*replica), is_copy)
    claim = Claim("gated", 1, (Segment("_w", shape[0] // 2), Segment("_v", shape[0] // 2))) if gated else None
    plan = plan_parameter(layout, claim)
    flat = torch.zeros(stop - start)
    return [
        LocalShard(plan.model_key(p.component), KeyEntry(dtype=dtype, shape=p.component.global_shape), p, flat, plan)
        for p in plan.slices
    ]


def scalar(key: str = "step", replica: tuple[int, int] = (0, 1)) -> LocalShard:
    """A slot of one number."""
    layout = ParameterLayout(key, key, (4, 3), None, Axis(0, 1), FlatRange(0, 12), Axis(*replica))
    plan = plan_parameter(layout, None)
    return LocalShard(key, KeyEntry(dtype="float32", shape=(), kind="tensor"), plan.slices[0], torch.zeros(()), plan)
