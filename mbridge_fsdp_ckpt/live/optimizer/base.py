# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What save and load need of an optimizer, whatever its class.

A *slot* is one entry of an optimizer's per-parameter state: `exp_avg`, `step`, or whatever an optimizer keeps.
Slots that are sharded like the parameter follow the parameter's plan; the others are scalars.  Two slots have names
here: the step counter, which lives in the state or in the group, and the copy of the weight in higher precision.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from mbridge_fsdp_ckpt.errors import UnsupportedStateError
from mbridge_fsdp_ckpt.live import huge_pages
from mbridge_fsdp_ckpt.live.tensors import local_shard
from mbridge_fsdp_ckpt.plan.keys import Kind

STEP = "step"
MASTER = "master_param"

STATISTICS = frozenset(
    {
        "acc_delta",
        "exp_avg",
        "exp_avg_sq",
        "exp_inf",
        "grad_avg",
        "max_exp_avg_sq",
        "momentum_buffer",
        "prev",
        "square_avg",
        "step_size",
        "sum",
    }
)
"""Slots that are made of gradients, not of weights, whichever optimizer keeps them under these names."""

_NUMBERS: dict[str, Callable[[float], int | float]] = {"int": int, "float": float, "bool": bool}


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot of one parameter on this rank.

    Args:
        kind: "sharded" has the parameter's local elements; "tensor" is a 0-d tensor; the rest are Python numbers.
        tensor: Flat local elements, or a 0-d tensor.
        scaled_from: The dtype in which the optimizer keeps it together with a scale, where `tensor` is what they stand
            for.
        kept: The tensor that the optimizer keeps; None for a Python number, and while none keeps it.
    """

    kind: Kind
    tensor: torch.Tensor
    scaled_from: torch.dtype | None = None
    kept: torch.Tensor | None = None

    def value(self) -> torch.Tensor | int | float:
        """A scalar slot as the optimizer keeps it."""
        if self.kind == "tensor":
            return self.tensor
        return _NUMBERS[self.kind](self.tensor.item())


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """What a slot is, without its elements; the fields of `Slot`."""

    kind: Kind
    dtype: torch.dtype
    scaled_from: torch.dtype | None = None

    @staticmethod
    def of(slot: Slot) -> SlotSpec:
        """The description of a slot."""
        return SlotSpec(slot.kind, slot.tensor.dtype, slot.scaled_from)


Hyperparameters = dict[str, Any]
"""The hyperparameters of a param group, as its optimizer keeps them."""

State = dict[str, Any]
"""The state of a parameter, as its optimizer keeps it."""


@dataclass(slots=True)
class Group:
    """A param group: its hyperparameters, and its own list of its parameters: copying that takes a call's time."""

    hyperparameters: Hyperparameters
    parameters: list[torch.Tensor]


Copy = Callable[[torch.Tensor, torch.Tensor], None]
"""Copies to the first from the second, flat local tensors of one parameter, those elements that a load has filled."""


class OptimizerAdapter(Protocol):
    """One optimizer instance, seen by save and load.  Nobody steps it.

    A save calls `groups`, `slots` and `class_name`.  A load calls `expected` and `counter` to match a checkpoint with
    the optimizer, `allocate` for memory to read into, and, once all ranks have verified what they read, `install`,
    `refresh` and `finish`.  A load of weights calls `refresh` and `finish` alone.
    """

    def groups(self) -> list[Group]:
        """Param groups without what the constructor chose (classes, fractions, pinning)."""

    def slots(self, parameter: torch.Tensor) -> dict[str, Slot]:
        """The parameter's slots on this rank; empty where it has no state."""

    def class_name(self, parameter: torch.Tensor) -> str:
        """The qualified name of the class that updates the parameter."""

    def expected(self, parameter: torch.Tensor, kept_by: str | None) -> dict[str, SlotSpec] | None:
        """The slots that the parameter has after a step, with the dtypes that the optimizer keeps them in.

        None where only a step would tell, for an optimizer class of somebody's own: the checkpoint then decides.

        Args:
            parameter: One of `groups()`.
            kept_by: The class that kept the saved state, see `unless_known`.
        """

    def counter(self, parameter: torch.Tensor) -> Hyperparameters | None:
        """The param group whose `step` counts for the parameter; None where a slot of its own does."""

    def allocate(self, parameter: torch.Tensor, specs: dict[str, SlotSpec]) -> dict[str, Slot]:
        """Memory to load slots into; nothing is written to it yet.  The optimizer stays as it is."""

    def install(self, parameter: torch.Tensor, slots: dict[str, Slot], step: float | None) -> None:
        """Put filled slots in place.

        Args:
            parameter: One of `groups()`.
            slots: From `allocate`, filled; empty for a parameter that was saved without state.
            step: The saved counter, wherever the saving optimizer kept it.
        """

    def refresh(self, parameter: torch.Tensor, copy: Copy) -> None:
        """Set the copies that the optimizer keeps of the (loaded) weight."""

    def finish(self, groups: list[Hyperparameters] | None) -> None:
        """Set each group's hyperparameters, in `groups()` order; None keeps them, as does an empty set."""


class Grouped(NamedTuple):
    """An optimizer, and its param groups as they were when somebody looked: others may change them meanwhile."""

    adapter: OptimizerAdapter
    groups: list[Group]


def slot_of(name: object, value: object, parameter: torch.Tensor, *, is_local: bool = False) -> Slot:
    """Classify one entry of an optimizer's state.

    Args:
        name: Its name.
        value: What the optimizer keeps.
        parameter: The parameter.
        is_local: Whether a tensor without distribution is known to be this rank's shard.

    Raises:
        UnsupportedStateError: It is neither sharded like the parameter nor a number, or its name cannot come back.
    """
    if not isinstance(name, str) or not name or "." in name:
        raise UnsupportedStateError(
            expected="names of optimizer slots to be strings without a dot, because keys on disk end with them",
            found=f"a slot named {name!r}",
            remedy="Rename the slot in the optimizer, or save without optimizer state.",
        )
    if isinstance(value, torch.Tensor):
        local = local_shard(value)
        if local.dim() == 0:
            return Slot("tensor", local, kept=value)
        if _is_sharded_like(value, parameter, is_local=is_local):
            return Slot("sharded", local.reshape(-1), kept=value)
    elif isinstance(value, bool):
        return Slot("bool", torch.tensor(value))
    elif isinstance(value, int):
        return Slot("int", torch.tensor(value, dtype=torch.int64))
    elif isinstance(value, float):
        return Slot("float", torch.tensor(value, dtype=torch.float64))
    raise UnsupportedStateError(
        expected=f"slot {name!r} to be a number, or a {_described(parameter)} as its parameter is",
        found=_described(value),
        remedy="Let the optimizer keep what has the parameter's elements as torch.zeros_like(parameter) does. Factored "
        "state, and matrices of other shapes, cannot be saved.",
    )


def _is_sharded_like(value: torch.Tensor, parameter: torch.Tensor, *, is_local: bool) -> bool:
    """Whether a tensor has the parameter's elements; as many elements do not make it so (a preconditioner)."""
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor) and isinstance(parameter, DTensor):
        alike = value.shape == parameter.shape and value.placements == parameter.placements
        return bool(alike and value.device_mesh == parameter.device_mesh)
    if isinstance(value, DTensor) or (isinstance(parameter, DTensor) and not is_local):
        return False
    return value.shape == local_shard(parameter).shape


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    shape, placements = f"shape {tuple(value.shape)}", getattr(value, "placements", None)
    return f"tensor of {shape}" if placements is None else f"DTensor of placements {placements} and {shape}"


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


def unless_known(class_name: str) -> str | None:
    """A class's qualified name, unless it is one of which `OptimizerAdapter.expected` knows the slots."""
    return None if class_name.startswith(("torch.optim.", "transformer_engine.")) else class_name


def is_same_class(one: str | None, other: str | None) -> bool:
    """Whether two qualified names are of one class, which may have moved to another module (`__main__`, say)."""
    return (one or "").rpartition(".")[2] == (other or "").rpartition(".")[2]


def groups_of(optimizer: Any) -> dict[int, Hyperparameters]:
    """The live param group of each parameter, by the parameter's `id`."""
    return {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}


def restored(live: object, saved: object) -> object:
    """A saved number as the live optimizer keeps it: in its tensor, which a captured graph reads, or as a number.

    What several groups were saved with is one object; each gets one of its own.
    """
    if not isinstance(saved, torch.Tensor | int | float) or getattr(saved, "numel", lambda: 1)() != 1:
        return copy.deepcopy(saved)
    if isinstance(live, torch.Tensor) and live.numel() == 1:
        return live.fill_(saved.item() if isinstance(saved, torch.Tensor) else saved)
    if isinstance(saved, torch.Tensor) and isinstance(live, int | float):
        return saved.item()
    return copy.deepcopy(saved)


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
