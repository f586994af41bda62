# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Megatron's HybridDeviceOptimizer: part of the parameters is updated on the host.

It holds torch optimizers over *inner* parameters (host copies, fp32 copies, or views), whose state is the state.
Each inner optimizer is read and written through its own adapter; counters are stored a parameter, so that the
offload fraction may change between save and load.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from mbridge_fsdp_ckpt.live.optimizer.base import (
    MASTER,
    STEP,
    Copy,
    Group,
    Hyperparameters,
    OptimizerAdapter,
    Slot,
    SlotSpec,
    groups_of,
)
from mbridge_fsdp_ckpt.live.optimizer.torch_optimizer import TorchOptimizerAdapter, set_hyperparameters
from mbridge_fsdp_ckpt.live.tensors import local_shard
from mbridge_fsdp_ckpt.versions import probe

_CONSTRUCTION = frozenset(
    {
        "offload_fraction",
        "cpu_optimizer_cls",
        "gpu_optimizer_cls",
        "param_update_in_fp32",
        "pin_cpu_grads",
        "pin_cpu_params",
        "overlap_cpu_optimizer_d2h_h2d",
        "fused",
    }
)


class HybridAdapter:
    """See `OptimizerAdapter`."""

    def __init__(self, optimizer: Any, adapter_for: Callable[[Any], OptimizerAdapter]) -> None:
        probe("a HybridDeviceOptimizer", optimizer)
        self.optimizer, self._adapter_for = optimizer, adapter_for

    @cached_property
    def _owners(self) -> dict[int, tuple[OptimizerAdapter, Hyperparameters]]:
        """By the `id` of an inner parameter, the adapter of its optimizer, and its param group.

        A save's call asks for none: to go through the parameters of hundreds of experts takes its time.
        """
        owners = dict[int, tuple[OptimizerAdapter, Hyperparameters]]()
        for sub_optimizer in self.optimizer.sub_optimizers:
            adapter = self._adapter_for(sub_optimizer)
            owners |= {inner: (adapter, group) for inner, group in groups_of(sub_optimizer).items()}
        return owners

    def groups(self) -> list[Group]:
        """See `OptimizerAdapter`."""
        return [
            Group({k: v for k, v in group.hyperparameters.items() if k not in _CONSTRUCTION}, group.parameters)
            for group in TorchOptimizerAdapter(self.optimizer).groups()
        ]

    def slots(self, parameter: torch.Tensor) -> dict[str, Slot]:
        """See `OptimizerAdapter`.  The fp32 master is left out where it repeats the main weight."""
        inner = self._inner(parameter)
        adapter, group = self._owners[id(inner)]
        slots = {name: slot for name, slot in adapter.slots(inner).items() if name != MASTER}
        if slots and STEP not in slots and STEP in group:
            slots[STEP] = Slot("tensor", torch.tensor(float(group[STEP])))
        if inner.dtype != parameter.dtype:
            slots[MASTER] = Slot("sharded", local_shard(inner).reshape(-1), kept=inner)
        return slots

    def class_name(self, parameter: torch.Tensor) -> str:
        """See `OptimizerAdapter`: that of the inner optimizer."""
        adapter, inner = self._inside(parameter)
        return adapter.class_name(inner)

    def expected(self, parameter: torch.Tensor, kept_by: str | None) -> dict[str, SlotSpec] | None:
        """See `OptimizerAdapter`."""
        adapter, inner = self._inside(parameter)
        kept = adapter.expected(inner, kept_by)
        if kept is None:
            return None
        own = {name: spec for name, spec in kept.items() if name != MASTER}
        return own | ({MASTER: SlotSpec("sharded", inner.dtype)} if inner.dtype != parameter.dtype else {})

    def counter(self, parameter: torch.Tensor) -> Hyperparameters | None:
        """See `OptimizerAdapter`."""
        adapter, inner = self._inside(parameter)
        return adapter.counter(inner)

    def allocate(self, parameter: torch.Tensor, specs: dict[str, SlotSpec]) -> dict[str, Slot]:
        """See `OptimizerAdapter`."""
        adapter, inner = self._inside(parameter)
        slots = adapter.allocate(inner, {name: spec for name, spec in specs.items() if name != MASTER})
        if MASTER in specs:
            slots[MASTER] = Slot("sharded", torch.empty_like(local_shard(inner)).reshape(-1))
        return slots

    def install(self, parameter: torch.Tensor, slots: dict[str, Slot], step: float | None) -> None:
        """See `OptimizerAdapter`."""
        adapter, inner = self._inside(parameter)
        if MASTER in slots:
            local_shard(inner).copy_(slots[MASTER].tensor.view(inner.shape))
        adapter.install(inner, {name: slot for name, slot in slots.items() if name != MASTER}, step)

    def refresh(self, parameter: torch.Tensor, copy: Copy) -> None:
        """See `OptimizerAdapter`."""
        inner = local_shard(self._inner(parameter))
        if inner.data_ptr() != local_shard(parameter).data_ptr():
            copy(inner.view(-1), local_shard(parameter).reshape(-1))

    def finish(self, groups: list[Hyperparameters] | None) -> None:
        """See `OptimizerAdapter`."""
        set_hyperparameters(self.optimizer, groups, without=(STEP,))
        for adapter in {id(adapter): adapter for adapter, _ in self._owners.values()}.values():
            adapter.finish(None if groups is None else [{} for _ in adapter.groups()])  # it counts by itself
        self.optimizer._sync_hdo_param_groups_to_sub_optimizers()
        self.optimizer._sync_sub_optimizers_state_to_hdo()

    def _inside(self, parameter: torch.Tensor) -> tuple[OptimizerAdapter, torch.Tensor]:
        """The adapter of the optimizer that updates the parameter, and the parameter as it has it."""
        inner = self._inner(parameter)
        return self._owners[id(inner)][0], inner

    def _inner(self, parameter: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.optimizer.param_to_inner_param[parameter]
        return inner
