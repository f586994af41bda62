# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What an optimizer keeps of each parameter, asked of the optimizer itself over a parameter of two elements."""

from __future__ import annotations

from typing import Any, Literal

import torch

from mbridge_fsdp_ckpt.integrations.bridge.without_gpu import as_if_there_was_one
from mbridge_fsdp_ckpt.live.optimizer.adapters import adapter_for
from mbridge_fsdp_ckpt.live.optimizer.base import STEP, SlotSpec
from mbridge_fsdp_ckpt.versions import require

Optimizer = Literal["fused", "torch", "none"]
"""Transformer Engine's FusedAdam, which Megatron takes; torch's, which it takes for what is on the host; none."""

Slots = dict[str, SlotSpec]
Moments = tuple[torch.dtype, torch.dtype]


def slots_of(
    optimizer: Optimizer,
    main_dtype: torch.dtype,
    moments: Moments = (torch.float32, torch.float32),
    *,
    is_hybrid: bool = False,
) -> Slots:
    """The slots of a parameter after the first step.

    Args:
        optimizer: Which one.
        main_dtype: Of the parameters that it updates.
        moments: Precisions of FusedAdam's two moments; torch's have the parameter's.
        is_hybrid: Whether it is a part of Megatron's HybridDeviceOptimizer, which counts steps a parameter.

    Raises:
        UnsupportedVersionError: Transformer Engine is not installed.
    """
    if optimizer == "none":
        return {}
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=main_dtype))
    made = _torch(parameter) if optimizer == "torch" else _fused(parameter, moments)
    slots = {name: SlotSpec(slot.kind, slot.tensor.dtype) for name, slot in adapter_for(made).slots(parameter).items()}
    if is_hybrid:
        slots.setdefault(STEP, SlotSpec("tensor", torch.float32))
    return slots


def _torch(parameter: torch.nn.Parameter) -> Any:
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


def _fused(parameter: torch.nn.Parameter, moments: Moments) -> Any:
    require("FusedAdam")
    from transformer_engine.pytorch.optimizers import FusedAdam

    with as_if_there_was_one():
        optimizer = FusedAdam([parameter], exp_avg_dtype=moments[0], exp_avg_sq_dtype=moments[1])
        optimizer.initialize_state(parameter, store_param_remainders=False)
    return optimizer
