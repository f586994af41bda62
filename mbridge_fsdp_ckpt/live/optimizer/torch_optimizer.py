# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Any `torch.optim.Optimizer` that keeps its state in `state[parameter]`: Adam, AdamW, SGD, Lion, ..."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from functools import cache, cached_property
from typing import Any

import torch

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
    is_same_class,
    like_parameter,
    put_in_place,
    restored,
    slot_of,
)
from mbridge_fsdp_ckpt.live.tensors import local_shard

_KERNELS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Hyperparameters of torch's optimizers that say how to compute, and where a counter lies: not what."""

_DECIDE_SLOTS = frozenset({"amsgrad", "centered", "momentum"})
"""Hyperparameters whose being on decides which slots there are.

Where they differ, so do the slots, and the load is refused; or the user allowed for it, and the live optimizer keeps
what its own slots are for.
"""

_OF_SEVERAL = frozenset({"amsgrad", "maximize", "bias_correction", "decoupled_weight_decay"})
"""Hyperparameters that some of the optimizers have between which state moves, and others have not."""

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

    def expected(self, parameter: torch.Tensor, kept_by: str | None) -> dict[str, SlotSpec] | None:
        """See `OptimizerAdapter`.  A subclass of one of torch's classes takes over what that class keeps."""
        kind = next(filter(is_of_torch, type(self.optimizer).__mro__), None)
        if kind is None or (kept_by is not None and is_same_class(kept_by, self.class_name(parameter))):
            return None
        local, group = local_shard(parameter), self._group(parameter)
        key = id(group), local.dtype, parameter.dim()
        if key not in self._kept:
            self._kept[key] = slots_after_a_step(kind, group, local.dtype, parameter.dim())
        return self._kept[key]

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
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and slots[name].kind == "tensor":
                state[name] = value.to(self._step_device(parameter))
        live, stays = self.optimizer.state.get(parameter, {}), bool(self._group(parameter).get("capturable"))
        self.optimizer.state[parameter] = put_in_place(live, state, stays=stays)

    def refresh(self, parameter: torch.Tensor, copy: Copy) -> None:
        """See `OptimizerAdapter`: torch's optimizers keep no copy."""

    def finish(self, groups: list[Hyperparameters] | None) -> None:
        """See `OptimizerAdapter`."""
        counts = not any(STEP in state for state in self.optimizer.state.values())
        is_known = is_of_torch(type(self.optimizer))
        set_hyperparameters(self.optimizer, groups, without=() if counts else (STEP,), is_known=is_known)

    def _step_device(self, parameter: torch.Tensor) -> torch.device:
        """torch/optim/adam.py `_init_group`: the counter lies on the host unless the kernel reads it."""
        group = self._group(parameter)
        return parameter.device if group.get("capturable") or group.get("fused") else torch.device("cpu")

    def _group(self, parameter: torch.Tensor) -> Hyperparameters:
        return self._groups.get(id(parameter), {})


def class_name(optimizer: object) -> str:
    """The qualified name of an optimizer's class."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def is_of_torch(kind: type) -> bool:
    """Whether it is one of torch's own optimizers."""
    return kind.__module__.startswith("torch.optim.") and kind is not torch.optim.Optimizer


def slots_after_a_step(
    kind: Any, group: Hyperparameters, dtype: torch.dtype, dimensions: int
) -> dict[str, SlotSpec] | None:
    """The slots that one of torch's own optimizers keeps of a parameter, asked of an instance made for that.

    That one steps a parameter of two elements a dimension.  Classes of others are not asked: their step may talk to
    other ranks, or need a gradient of its own kind.

    Args:
        kind: The optimizer's class.
        group: The param group, whose settings decide (momentum, amsgrad).
        dtype: Of the parameter.
        dimensions: Of the parameter.

    Returns:
        None for those that cannot step so (LBFGS, SparseAdam).
    """
    parameter = torch.nn.Parameter(torch.zeros((2,) * dimensions, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    accepted = inspect.signature(kind).parameters.keys() - _KERNELS - {"params", "lr"}
    settings = {name: group[name] for name in accepted & group.keys()}
    step = getattr(kind.step, "__wrapped__", kind.step)  # without the hooks that a job has on the steps of optimizers
    try:
        made = kind([parameter], **settings)
        step(made)
    except (RuntimeError, TypeError, ValueError):
        return None
    return {name: SlotSpec.of(slot) for name, slot in TorchOptimizerAdapter(made).slots(parameter).items()}


def set_hyperparameters(
    optimizer: torch.optim.Optimizer,
    groups: list[Hyperparameters] | None,
    without: Collection[str] = (),
    *,
    is_known: bool = True,
) -> None:
    """Restore hyperparameters of param groups; what the live optimizer's class does not have is not added.

    What a scheduler, a training loop or a step has put into a group (`initial_lr`, `step`) is no constructor's, and
    comes back even where the live group has none yet.

    Args:
        optimizer: The live optimizer.
        groups: In the order of its param groups; None keeps all, and an empty set those of its group.
        without: Names that stay as they are.
        is_known: Whether its constructor is known. Otherwise it may put anything into its groups.
    """
    if groups is None:
        return
    of_class = {"decoupled_weight_decay"} if isinstance(optimizer, torch.optim.AdamW) else set[str]()  # as in torch
    for live, saved in zip(optimizer.param_groups, groups, strict=True):
        of_others = _constructor_names() - live.keys() if is_known else frozenset[str]()
        switches = {
            name for name in _DECIDE_SLOTS & live.keys() & saved.keys() if bool(live[name]) != bool(saved[name])
        }
        for name in saved.keys() - _KERNELS - _NOT_HYPERPARAMETERS - of_others - of_class - switches - set(without):
            live[name] = restored(live.get(name), saved[name])


def not_of(saved: Hyperparameters, live: Hyperparameters) -> str:
    """Which saved hyperparameters an optimizer of the live one's class does not have, and whose they are; or "".

    Args:
        saved: Of a param group of the checkpoint.
        live: Of that group here.
    """
    strange = (saved.keys() & _constructor_names()) - live.keys() - _OF_SEVERAL - _KERNELS
    if not strange:
        return ""
    kinds = [kind for kind in _kinds() if strange <= inspect.signature(kind).parameters.keys()]
    whose = f", as {' or '.join(f'torch.optim.{kind.__name__}' for kind in kinds)} has them" if kinds else ""
    return f"{', '.join(sorted(strange))}{whose}"


def _kinds() -> list[Any]:
    """Torch's optimizers."""
    return [kind for kind in vars(torch.optim).values() if inspect.isclass(kind)]


@cache
def _constructor_names() -> frozenset[str]:
    """What constructors of torch's optimizers and of FusedAdam take."""
    named = {name for kind in _kinds() for name in inspect.signature(kind).parameters}
    return frozenset(named | {"bias_correction", "decoupled_weight_decay"})
