"""Any `torch.optim.Optimizer` that keeps its state in `state[parameter]`: Adam, AdamW, SGD, Lion, ..."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from functools import cache, cached_property
from typing import Any

import torch

from mbridge_fsdp_ckpt.live.megatron_fsdp import local_shard
from mbridge_fsdp_ckpt.live.optimizer.base import (
    STEP,
    Copy,
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

_NOT_HYPERPARAMETERS = frozenset({"params", "param_names"})
"""What a param group holds and is (`Optimizer.add_param_group`): the live optimizer's, whatever was saved."""


class TorchOptimizerAdapter:
    """State lives in `optimizer.state`, counters too, as 0-d tensors."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._kept: dict[tuple[int, torch.dtype, int], dict[str, SlotSpec] | None] = {}

    @cached_property
    def _groups(self) -> dict[int, Hyperparameters]:
        """Not asked for by a save."""
        return groups_of(self.optimizer)

    def groups(self) -> list[Group]:
        """See `OptimizerAdapter`."""
        return [
            Group({name: v for name, v in group.items() if name not in _NOT_HYPERPARAMETERS}, group["params"])
            for group in self.optimizer.param_groups
        ]

    def slots(self, parameter: torch.Tensor) -> dict[str, Slot]:
        """See `OptimizerAdapter`."""
        state = self.optimizer.state.get(parameter, {})
        return {name: slot_of(name, value, parameter) for name, value in state.items() if value is not None}

    def class_name(self, parameter: torch.Tensor) -> str:
        """See `OptimizerAdapter`."""
        return class_name(self.optimizer)

    def expected(self, parameter: torch.Tensor) -> dict[str, SlotSpec] | None:
        """See `OptimizerAdapter`.  torch's own classes are asked with a step of their own; others by live state."""
        local, group = local_shard(parameter), self._group(parameter)
        kind = id(group), local.dtype, parameter.dim()
        if kind not in self._kept:
            self._kept[kind] = slots_after_a_step(self.optimizer, group, local.dtype, parameter.dim())
        kept = self._kept[kind]
        return self._live_slots(parameter) if kept is None else kept

    def _live_slots(self, parameter: torch.Tensor) -> dict[str, SlotSpec] | None:
        """Of the parameter, or of one of the same dtype in its group."""
        for other in (parameter, *self._group(parameter).get("params", ())):
            if other.dtype == parameter.dtype and (slots := self.slots(other)):
                return {name: SlotSpec.of(slot) for name, slot in slots.items()}
        return None

    def counter(self, parameter: torch.Tensor) -> Hyperparameters | None:
        """See `OptimizerAdapter`."""
        return None

    def allocate(self, parameter: torch.Tensor, specs: dict[str, SlotSpec]) -> dict[str, Slot]:
        """See `OptimizerAdapter`."""
        return {name: empty_slot(parameter, spec, parameter.device) for name, spec in specs.items()}

    def install(self, parameter: torch.Tensor, slots: dict[str, Slot], step: float | None) -> None:
        """See `OptimizerAdapter`."""
        if not slots:
            self.optimizer.state.pop(parameter, None)
            return
        if STEP in slots and step is not None:
            slots[STEP].tensor.fill_(step)
        state: State = {
            name: like_parameter(parameter, slot.tensor) if slot.kind == "sharded" else slot.value()
            for name, slot in slots.items()
        }
        if isinstance(state.get(STEP), torch.Tensor):
            state[STEP] = state[STEP].to(self._step_device(parameter))
        live, stays = self.optimizer.state.get(parameter, {}), bool(self._group(parameter).get("capturable"))
        self.optimizer.state[parameter] = put_in_place(live, state, stays=stays)

    def refresh(self, parameter: torch.Tensor, copy: Copy) -> None:
        """See `OptimizerAdapter`: torch's optimizers keep no copy."""

    def finish(self, groups: list[Hyperparameters] | None) -> None:
        """See `OptimizerAdapter`."""
        counts = not any(STEP in state for state in self.optimizer.state.values())
        set_hyperparameters(self.optimizer, groups, without=() if counts else (STEP,))

    def _step_device(self, parameter: torch.Tensor) -> torch.device:
        """torch/optim/adam.py `_init_group`: the counter lies on the host unless the kernel reads it."""
        group = self._group(parameter)
        return parameter.device if group.get("capturable") or group.get("fused") else torch.device("cpu")

    def _group(self, parameter: torch.Tensor) -> Hyperparameters:
        return self._groups.get(id(parameter), {})


def class_name(optimizer: object) -> str:
    """The qualified name of an optimizer's class."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def is_of_torch(optimizer: object) -> bool:
    """Whether it is an instance of one of torch's own classes, not of a subclass."""
    return type(optimizer).__module__.startswith("torch.optim.")


def slots_after_a_step(
    optimizer: torch.optim.Optimizer, group: Hyperparameters, dtype: torch.dtype, dimensions: int
) -> dict[str, SlotSpec] | None:
    """The slots that one of torch's own optimizers keeps of a parameter, asked of another instance of the class.

    That one steps a parameter of two elements a dimension.  Classes of others are not asked: their step may talk to
    other ranks, or need a gradient of its own kind.

    Args:
        optimizer: The live optimizer, which stays as it is.
        group: The param group, whose settings decide (momentum, amsgrad).
        dtype: Of the parameter.
        dimensions: Of the parameter.

    Returns:
        None for classes of others, and for those that cannot step so (LBFGS, SparseAdam).
    """
    if not is_of_torch(optimizer):
        return None
    parameter = torch.nn.Parameter(torch.zeros((2,) * dimensions, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    kind: Any = type(optimizer)
    accepted = inspect.signature(kind).parameters.keys() - _KERNELS - {"params", "lr"}
    settings = {name: group[name] for name in accepted & group.keys()}
    step = getattr(kind.step, "__wrapped__", kind.step)  # without the hooks that a job has on the steps of optimizers
    try:
        other = kind([parameter], **settings)
        step(other)
    except (RuntimeError, TypeError, ValueError):
        return None
    return {name: SlotSpec.of(slot) for name, slot in TorchOptimizerAdapter(other).slots(parameter).items()}


def set_hyperparameters(
    optimizer: torch.optim.Optimizer, groups: list[Hyperparameters] | None, without: Collection[str] = ()
) -> None:
    """Restore hyperparameters of param groups; what the live optimizer's class does not have is not added.

    What a scheduler, a training loop or a step has put into a group (`initial_lr`, `step`) is no constructor's, and
    comes back even where the live group has none yet.

    Args:
        optimizer: The live optimizer.
        groups: In the order of its param groups; None keeps all, and an empty set those of its group.
        without: Names that stay as they are.
    """
    if groups is None:
        return
    for live, saved in zip(optimizer.param_groups, groups, strict=True):
        of_others = _constructor_names() - live.keys()
        for name in saved.keys() - _KERNELS - _NOT_HYPERPARAMETERS - of_others - set(without):
            live[name] = restored(live.get(name), saved[name])


@cache
def _constructor_names() -> frozenset[str]:
    """What constructors of torch's optimizers and of FusedAdam take."""
    kinds = [kind for kind in vars(torch.optim).values() if inspect.isclass(kind)]
    named = {name for kind in kinds for name in inspect.signature(kind).parameters}
    return frozenset(named | {"bias_correction", "decoupled_weight_decay"})
