# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Which adapter handles which optimizer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from mbridge_fsdp_ckpt.errors import UnsupportedStateError
from mbridge_fsdp_ckpt.live.optimizer.base import Grouped, OptimizerAdapter
from mbridge_fsdp_ckpt.live.optimizer.fused_adam import FusedAdamAdapter
from mbridge_fsdp_ckpt.live.optimizer.hybrid import HybridAdapter
from mbridge_fsdp_ckpt.live.optimizer.torch_optimizer import TorchOptimizerAdapter
from mbridge_fsdp_ckpt.remedies import remedy

_GRAPHS = "megatron.core.optimizer.optimizer_cuda_graph"
"""Not in every release; who trains with it has imported it."""


def adapters_for(optimizer: Any) -> list[OptimizerAdapter]:
    """Adapters of the torch optimizers inside a Megatron optimizer (or a torch optimizer itself).

    Raises:
        UnsupportedStateError: There is an optimizer that nobody knows.
    """
    return [adapter_for(inner) for inner in _inner(optimizer)]


def grouped(optimizer: Any) -> list[Grouped]:
    """The same, each with its param groups as they are now.

    Raises:
        UnsupportedStateError: There is an optimizer that nobody knows.
    """
    return [Grouped(adapter, adapter.groups()) for adapter in adapters_for(optimizer)]


def adapter_for(optimizer: Any) -> OptimizerAdapter:
    """The adapter of one torch optimizer."""
    if hasattr(optimizer, "cpu_optimizers"):
        return HybridAdapter(optimizer, adapter_for)
    if hasattr(optimizer, "get_unscaled_state"):
        return FusedAdamAdapter(optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        return TorchOptimizerAdapter(optimizer)
    raise UnsupportedStateError(
        expected="a torch.optim.Optimizer, Transformer Engine's FusedAdam or Megatron's HybridDeviceOptimizer",
        found=f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        remedy=remedy("Use one of these.", "Or save without optimizer state, with {no_optimizer}."),
    )


def refuse_global_state(optimizer: Any) -> None:
    """Refuse to save an optimizer with state that belongs to no parameter: no load could bring it back.

    Parameters that were taken out of their param groups are not stepped any more: their state is not saved.

    Raises:
        UnsupportedStateError: There is some, under a name of its own, such as `state["global"]`.
    """
    for each in _all(optimizer):
        for owner, kept in each.state.items():
            if kept and not isinstance(owner, torch.Tensor):
                raise UnsupportedStateError(
                    expected="optimizer state of parameters alone",
                    found=f"state of {owner!r}",
                    remedy=remedy(
                        "Remove it.", "Or keep it elsewhere, in {values}.", "Or save without state: {no_optimizer}."
                    ),
                )


def kept_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """All tensors that an optimizer keeps: slots, and its own copies of weights (`HybridDeviceOptimizer`)."""
    for inner in _inner(optimizer):
        for each in getattr(inner, "sub_optimizers", ()):
            yield from (parameter for group in each.param_groups for parameter in group["params"])
    for each in _all(optimizer):
        for kept in each.state.values():
            yield from (value for value in kept.values() if isinstance(value, torch.Tensor))


def may_be_replayed(optimizer: Any) -> bool:
    """Whether steps may be replays of a captured graph: no hook of `Optimizer.step` runs then, torch counts nothing.

    An optimizer is made for that: `capturable`, as Megatron's `optimizer_cuda_graph` has it made.  Megatron's wrapper
    has one graph a process: where that is captured, it changes weights that are saved without their optimizer, too.

    Args:
        optimizer: Megatron's optimizer, or a torch optimizer; None where none is saved.
    """
    wrapper = getattr(sys.modules.get(_GRAPHS), "OptimizerCudaGraphWrapper", None)
    if getattr(wrapper, "cuda_graph", None) is not None:
        return True
    if optimizer is None:
        return False
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    if any(getattr(getattr(part, "config", None), "optimizer_cuda_graph", False) for part in parts):
        return True
    inner = list(_all(optimizer))
    groups = (group for each in inner for group in each.param_groups)
    return any(getattr(each, "capturable", False) for each in inner) or any(group.get("capturable") for group in groups)


def grad_scalers(optimizer: Any) -> list[Any]:
    """Loss scalers of a Megatron optimizer's parts, in order; empty without fp16."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.grad_scaler for part in parts if getattr(part, "grad_scaler", None) is not None]


def _all(optimizer: Any) -> Iterator[Any]:
    """Torch optimizers inside, and those inside of these."""
    for inner in _inner(optimizer):
        yield from (inner, *getattr(inner, "sub_optimizers", ()))


def _inner(optimizer: Any) -> list[Any]:
    if hasattr(optimizer, "chained_optimizers"):
        return [inner for part in optimizer.chained_optimizers for inner in _inner(part)]
    if getattr(optimizer, "is_stub_optimizer", False):
        return []
    if isinstance(optimizer, torch.optim.Optimizer):
        return [optimizer]
    return [optimizer.optimizer] if hasattr(optimizer, "optimizer") else [optimizer]
