"""Which adapter handles which optimizer."""

from __future__ import annotations

from typing import Any

import torch

from mbridge_fsdp_ckpt.errors import UnsupportedStateError
from mbridge_fsdp_ckpt.live.optimizer.base import Grouped, OptimizerAdapter
from mbridge_fsdp_ckpt.live.optimizer.fused_adam import FusedAdamAdapter
from mbridge_fsdp_ckpt.live.optimizer.hybrid import HybridAdapter
from mbridge_fsdp_ckpt.live.optimizer.torch_optimizer import TorchOptimizerAdapter


def adapters_for(optimizer: Any) -> list[OptimizerAdapter]:
    """Adapters of the torch optimizers inside a Megatron optimizer (or a torch optimizer itself).

    Raises:
        UnsupportedStateError: There is an optimizer that nobody knows.
    """
    return [adapter_for(inner) for inner in _inner(optimizer)]


def grouped(optimizer: Any) -> list[Grouped]:
    """The same, each with its param groups as they are now.

    Raises:
        UnsupportedStateError: See `adapters_for`.
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
        remedy="Use one of these, or save without optimizer state (checkpoint.save_optim=False).",
    )


def refuse_global_state(optimizer: Any) -> None:
    """Refuse to save an optimizer with state that belongs to no parameter: no load could bring it back.

    Parameters that were taken out of their param groups are not stepped any more: their state is not saved.

    Raises:
        UnsupportedStateError: There is some, under a name of its own, such as `state["global"]`.
    """
    for inner in _inner(optimizer):
        for each in (inner, *getattr(inner, "sub_optimizers", ())):
            for owner, kept in each.state.items():
                if kept and not isinstance(owner, torch.Tensor):
                    raise UnsupportedStateError(
                        expected="optimizer state of parameters alone",
                        found=f"state of {owner!r}",
                        remedy=f"Keep it elsewhere than in the state of {type(each).__qualname__}, such as in values=; "
                        "or remove it, or save without optimizer state.",
                    )


def grad_scalers(optimizer: Any) -> list[Any]:
    """Loss scalers of a Megatron optimizer's parts, in order; empty without fp16."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.grad_scaler for part in parts if getattr(part, "grad_scaler", None) is not None]


def _inner(optimizer: Any) -> list[Any]:
    if hasattr(optimizer, "chained_optimizers"):
        return [inner for part in optimizer.chained_optimizers for inner in _inner(part)]
    if getattr(optimizer, "is_stub_optimizer", False):
        return []
    if isinstance(optimizer, torch.optim.Optimizer):
        return [optimizer]
    return [optimizer.optimizer] if hasattr(optimizer, "optimizer") else [optimizer]
