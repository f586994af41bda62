"""Transformer Engine's FusedAdam: the step counter lives in the group, states may be of lower precision.

Its state is a DTensor for DTensor parameters since Transformer Engine's pull request 2795 and a plain local tensor
before; both are read.  `initialize_state` (public) makes a state as the installed version keeps it.
fp16 and fp8 states carry a scale a shard: they are stored as the fp32 values they stand for.
"""

from __future__ import annotations

from typing import Any

import torch

from mbridge_fsdp_ckpt.optimizer_state.base import STEP, Group, Slot, SlotSpec, empty_slot, slot_of
from mbridge_fsdp_ckpt.optimizer_state.torch_optimizer import TorchOptimizerAdapter, set_hyperparameters
from mbridge_fsdp_ckpt.parameters import local_shard

_SCALED = (torch.float16, torch.uint8)


class FusedAdamAdapter:
    """See `OptimizerAdapter`."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def groups(self) -> list[Group]:
        """See `OptimizerAdapter`."""
        return TorchOptimizerAdapter(self.optimizer).groups()

    def slots(self, parameter: torch.Tensor) -> dict[str, Slot]:
        """See `OptimizerAdapter`."""
        state = self.optimizer.state.get(parameter, {})
        return {
            name: slot_of(
                name, self.optimizer.get_unscaled_state(parameter, name) if self._scaled(name) else value, parameter
            )
            for name, value in state.items()
        }

    def allocate(self, parameter: torch.Tensor, specs: dict[str, SlotSpec]) -> dict[str, Slot]:
        """See `OptimizerAdapter`."""
        return {
            name: empty_slot(parameter, SlotSpec(spec.kind, self._stored_dtype(name, spec.dtype)), parameter.device)
            for name, spec in specs.items()
            if name != STEP
        }

    def install(self, parameter: torch.Tensor, slots: dict[str, Slot] | None, step: float | None) -> None:
        """See `OptimizerAdapter`."""
        if not slots:
            if slots is not None:
                self.optimizer.state.pop(parameter, None)
            return
        self._set_step(parameter, step)
        self.optimizer.initialize_state(parameter, self.optimizer.store_param_remainders)
        for name, slot in slots.items():
            if self._scaled(name):
                self.optimizer.set_scaled_state(parameter, name, slot.tensor.view(local_shard(parameter).shape))
            else:
                target = local_shard(self.optimizer.state[parameter][name])
                target.copy_(slot.tensor.view(target.shape))

    def finish(self, groups: list[dict[str, Any]] | None) -> None:
        """See `OptimizerAdapter`."""
        set_hyperparameters(self.optimizer, groups, also=(STEP,))

    def _set_step(self, parameter: torch.Tensor, step: float | None) -> None:
        """Where the saving optimizer counted a parameter; a saved group's counter overrides it in `finish`."""
        for group in self.optimizer.param_groups:
            if step is not None and any(parameter is member for member in group["params"]):
                group[STEP] = int(step)

    def _dtype(self, name: str) -> torch.dtype | None:
        dtype: torch.dtype | None = self.optimizer.name_to_dtype_map.get(name)
        return dtype

    def _scaled(self, name: str) -> bool:
        return self._dtype(name) in _SCALED

    def _stored_dtype(self, name: str, saved: torch.dtype) -> torch.dtype:
        """fp32 where a scale is applied afterwards, else as this optimizer keeps it."""
        return torch.float32 if self._scaled(name) else (self._dtype(name) or saved)
