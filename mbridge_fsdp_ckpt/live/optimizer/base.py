"""What save and load need of an optimizer, whatever its class.

A *slot* is one entry of an optimizer's per-parameter state: `exp_avg`, `step`, or whatever an optimizer keeps.
Slots of the parameter's size follow the parameter's plan; the others are scalars.  Nothing here names a slot of a
particular optimizer, but for the step counter: optimizers disagree on whether it lives in the state or in the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from mbridge_fsdp_ckpt.errors import UnsupportedStateError
from mbridge_fsdp_ckpt.live import huge_pages
from mbridge_fsdp_ckpt.live.megatron_fsdp import local_shard
from mbridge_fsdp_ckpt.plan.keys import Kind

STEP = "step"
MASTER = "master_param"
_NUMBERS: dict[str, Callable[[float], int | float]] = {"int": int, "float": float, "bool": bool}


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot of one parameter on this rank.

    Args:
        kind: "sharded" has the parameter's local elements; "tensor" is a 0-d tensor; the rest are Python numbers.
        tensor: Flat local elements, or a 0-d tensor.
    """

    kind: Kind
    tensor: torch.Tensor

    def value(self) -> torch.Tensor | int | float:
        """A scalar slot as the optimizer keeps it."""
        if self.kind == "tensor":
            return self.tensor
        return _NUMBERS[self.kind](self.tensor.item())


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """A slot to allocate."""

    kind: Kind
    dtype: torch.dtype


Hyperparameters = dict[str, Any]
"""Of a param group, as its optimizer keeps them."""

State = dict[str, Any]
"""Of a parameter, as its optimizer keeps it."""


@dataclass(slots=True)
class Group:
    """A param group: its hyperparameters, and its own list of its parameters: copying that takes a call's time."""

    hyperparameters: Hyperparameters
    parameters: list[torch.Tensor]


class OptimizerAdapter(Protocol):
    """One optimizer instance, seen by save and load.  Nobody steps it."""

    def groups(self) -> list[Group]:
        """Param groups without what the constructor chose (classes, fractions, pinning)."""

    def slots(self, parameter: torch.Tensor) -> dict[str, Slot]:
        """The parameter's slots on this rank; empty where it has no state."""

    def allocate(self, parameter: torch.Tensor, specs: dict[str, SlotSpec]) -> dict[str, Slot]:
        """Destinations for loaded slots, without those that this optimizer keeps elsewhere."""

    def install(self, parameter: torch.Tensor, slots: dict[str, Slot] | None, step: float | None) -> None:
        """Refresh copies of the (loaded) main weight and put filled slots in place.

        Args:
            parameter: One of `groups()`.
            slots: From `allocate`, filled; empty for a parameter saved without state; None to keep what is there.
            step: The saved counter, wherever the saving optimizer kept it.
        """

    def finish(self, groups: list[Hyperparameters] | None) -> None:
        """Set each group's hyperparameters, in `groups()` order; None keeps them."""


class Grouped(NamedTuple):
    """An optimizer, and its param groups as they were when somebody looked: others may change them meanwhile."""

    adapter: OptimizerAdapter
    groups: list[Group]


def slot_of(name: str, value: object, parameter: torch.Tensor) -> Slot:
    """Classify one entry of an optimizer's state.

    Raises:
        UnsupportedStateError: It is neither of the parameter's local size, nor a number.
    """
    if isinstance(value, torch.Tensor):
        local = local_shard(value)
        if local.dim() == 0:
            return Slot("tensor", local)
        if local.numel() == local_shard(parameter).numel():
            return Slot("sharded", local.reshape(-1))
    elif isinstance(value, bool):
        return Slot("bool", torch.tensor(value))
    elif isinstance(value, int):
        return Slot("int", torch.tensor(value, dtype=torch.int64))
    elif isinstance(value, float):
        return Slot("float", torch.tensor(value, dtype=torch.float64))
    raise UnsupportedStateError(
        expected=f"slot {name!r} to be a number or to have the {local_shard(parameter).numel()} elements of the shard",
        found=f"{type(value).__name__} of shape {tuple(getattr(value, 'shape', ()))}",
        remedy="Optimizers with factored or other state than this need an adapter of their own.",
    )


def empty_slot(parameter: torch.Tensor, spec: SlotSpec, device: torch.device) -> Slot:
    """An unfilled slot."""
    if spec.kind == "sharded":
        return Slot("sharded", huge_pages.empty(local_shard(parameter).numel(), spec.dtype, device))
    return Slot(spec.kind, torch.zeros((), dtype=spec.dtype))


def put_in_place(live: State, new: State, *, stays: bool = True) -> State:
    """New state, in the live state's own tensors where those fit: a captured graph knows them by their address.

    Args:
        live: The state so far.
        new: The new one.
        stays: Whether tensors of the host stay, too.  Where no graph reads them, to copy them would be for nothing.
    """
    return {name: _in_place(live.get(name), value, stays=stays) for name, value in new.items()}


def _in_place(live: object, new: object, *, stays: bool) -> object:
    if not (isinstance(live, torch.Tensor) and isinstance(new, torch.Tensor)):
        return new
    target, source = local_shard(live), local_shard(new)
    is_alike = (target.shape, target.dtype, target.device) == (source.shape, source.dtype, source.device)
    if not is_alike or (target.device.type == "cpu" and not stays):
        return new
    target.copy_(source)
    return live


def groups_of(optimizer: Any) -> dict[int, Hyperparameters]:
    """The live param group of each parameter, by the parameter's `id`."""
    return {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}


def restored(live: object, saved: object) -> object:
    """A saved number as the live optimizer keeps it: in its tensor, which a captured graph reads, or as a number."""
    if not isinstance(saved, torch.Tensor | int | float) or getattr(saved, "numel", lambda: 1)() != 1:
        return saved
    if isinstance(live, torch.Tensor) and live.numel() == 1:
        return live.fill_(saved.item() if isinstance(saved, torch.Tensor) else saved)
    return saved.item() if isinstance(saved, torch.Tensor) and isinstance(live, int | float) else saved


def like_parameter(parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """A flat local tensor, shaped and, for a DTensor parameter, distributed like it.  No communication."""
    from torch.distributed.tensor import DTensor

    local = flat.view(local_shard(parameter).shape)
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.size(),
        stride=parameter.stride(),
    )
