"""Any `torch.optim.Optimizer` that keeps its state in `state[parameter]`: Adam, AdamW, SGD, Lion, ..."""

from __future__ import annotations

from functools import cached_property

import torch

from mbridge_fsdp_ckpt.live.optimizer.base import (
    STEP,
    Group,
    Hyperparameters,
    Slot,
    SlotSpec,
    State,
    empty_slot,
    groups_of,
    like_parameter,
    put_in_place,
    restored,
    slot_of,
)

_KERNELS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Hyperparameters of torch's optimizers that say how to compute, and where a counter lies: not what."""


class TorchOptimizerAdapter:
    """State lives in `optimizer.state`, counters too, as 0-d tensors."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @cached_property
    def _groups(self) -> dict[int, Hyperparameters]:
        """Not asked for by a save."""
        return groups_of(self.optimizer)

    def groups(self) -> list[Group]:
        """See `OptimizerAdapter`."""
        return [
            Group({name: value for name, value in group.items() if name != "params"}, group["params"])
            for group in self.optimizer.param_groups
        ]

    def slots(self, parameter: torch.Tensor) -> dict[str, Slot]:
        """See `OptimizerAdapter`."""
        state = self.optimizer.state.get(parameter, {})
        return {name: slot_of(name, value, parameter) for name, value in state.items() if value is not None}

    def allocate(self, parameter: torch.Tensor, specs: dict[str, SlotSpec]) -> dict[str, Slot]:
        """See `OptimizerAdapter`."""
        return {name: empty_slot(parameter, spec, parameter.device) for name, spec in specs.items()}

    def install(self, parameter: torch.Tensor, slots: dict[str, Slot] | None, step: float | None) -> None:
        """See `OptimizerAdapter`."""
        if not slots:
            if slots is not None:
                self.optimizer.state.pop(parameter, None)
            return
        state: State = {
            name: like_parameter(parameter, slot.tensor) if slot.kind == "sharded" else slot.value()
            for name, slot in slots.items()
        }
        if step is not None and (STEP not in state or isinstance(state[STEP], torch.Tensor)):
            state[STEP] = torch.tensor(step, dtype=torch.float32, device=self._step_device(parameter))
        live, stays = self.optimizer.state.get(parameter, {}), bool(self._group(parameter).get("capturable"))
        self.optimizer.state[parameter] = put_in_place(live, state, stays=stays)

    def finish(self, groups: list[Hyperparameters] | None) -> None:
        """See `OptimizerAdapter`."""
        set_hyperparameters(self.optimizer, groups)

    def _step_device(self, parameter: torch.Tensor) -> torch.device:
        """torch/optim/adam.py `_init_group`: the counter lies on the host unless the kernel reads it."""
        group = self._group(parameter)
        return parameter.device if group.get("capturable") or group.get("fused") else torch.device("cpu")

    def _group(self, parameter: torch.Tensor) -> Hyperparameters:
        return self._groups.get(id(parameter), {})


def set_hyperparameters(optimizer: torch.optim.Optimizer, groups: list[Hyperparameters] | None) -> None:
    """Restore hyperparameters that the live groups have too, but for the choice of kernels; None keeps all."""
    if groups is None:
        return
    for live, saved in zip(optimizer.param_groups, groups, strict=True):
        for name in live.keys() & saved.keys() - _KERNELS:
            live[name] = restored(live[name], saved[name])
