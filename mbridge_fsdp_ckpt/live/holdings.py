"""What a rank holds for a checkpoint: keys, boxes and the tensors behind them.

Planning is arithmetic and its result is kept for the next save; tensors are looked up anew each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.families.registry import default_registry
from mbridge_fsdp_ckpt.live.megatron_fsdp import ModelParameter, model_parameters
from mbridge_fsdp_ckpt.live.optimizer.adapters import adapters_for
from mbridge_fsdp_ckpt.live.optimizer.base import Hyperparameters, OptimizerAdapter, Slot
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.dtypes import dtype_name
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.plan.layout import ParameterLayout
from mbridge_fsdp_ckpt.plan.pieces import Component, ParameterPlan, Piece, plan_parameter

KeyFilter = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Planned:
    """A parameter or buffer of the model with its plan."""

    parameter: ModelParameter
    plan: ParameterPlan

    @property
    def tensor(self) -> torch.Tensor:
        """The live tensor."""
        return self.parameter.tensor


@dataclass(frozen=True, slots=True)
class Holding:
    """One tensor's block on this rank.

    Args:
        key: Key on disk.
        entry: The key's global description.
        piece: The block; for a scalar, the one that declares the key, if this rank has that one.
        flat: The flattened local shard that the piece's source indexes, or the scalar.
        plan: The parameter it belongs to.
    """

    key: str
    entry: KeyEntry
    piece: Piece
    flat: torch.Tensor
    plan: ParameterPlan

    @property
    def is_scalar(self) -> bool:
        """Whether the tensor is one number of the parameter."""
        return self.entry.kind != "sharded"

    @property
    def declares(self) -> bool:
        """Whether it counts for the plan: every shard has the parameter's numbers, one declares them."""
        return self.piece.is_origin or not self.is_scalar

    @property
    def box(self) -> Box:
        """The block, in the global tensor."""
        return Box((), ()) if self.is_scalar else self.piece.box

    def elements(self) -> torch.Tensor:
        """The block's elements, flat."""
        block: torch.Tensor = self.flat if self.is_scalar else self.piece.block(self.flat)
        return block.reshape(-1)


_plans: WeakKeyDictionary[object, dict[ParameterLayout, ParameterPlan]] = WeakKeyDictionary()


def plan_model(module: Any) -> list[Planned]:
    """Plan every parameter and persistent buffer of a `MegatronFSDP` module; not twice while its layouts stand.

    Raises:
        LayoutError, FamilyError: See `model_parameters`, `FamilyRegistry`.
    """
    known = _plans.setdefault(module, {})
    planned = []
    for parameter in model_parameters(module):
        if parameter.layout not in known:
            claim = default_registry().claim(parameter.context) if parameter.context else None
            known[parameter.layout] = plan_parameter(parameter.layout, claim)
        planned.append(Planned(parameter, known[parameter.layout]))
    return planned


def model_holdings(
    planned: list[Planned], include: KeyFilter | None = None, vocabulary_size: int | None = None
) -> Iterator[Holding]:
    """The weights and buffers.

    Args:
        planned: The model.
        include: Filters by the model's own key.
        vocabulary_size: Rows of the vocabulary without its padding, where known.
    """
    for item in planned:
        if include is None or include(item.plan.layout.key):
            dtype = dtype_name(item.tensor.dtype)
            yield from _blocks(item.plan, item.plan.model_key, dtype, item.parameter.elements(), vocabulary_size)


@dataclass(frozen=True, slots=True)
class OptimizerPart:
    """One torch optimizer with the plans of its parameters."""

    adapter: OptimizerAdapter
    plans: dict[int, ParameterPlan]

    def parameters(self) -> Iterator[tuple[torch.Tensor, ParameterPlan]]:
        """Its parameters with their plans."""
        for group in self.adapter.groups():
            for parameter in group.parameters:
                yield parameter, self.plans[id(parameter)]

    def group_names(self) -> Iterator[tuple[Hyperparameters, list[str]]]:
        """Hyperparameters and optimizer names, a group."""
        for hyperparameters, plans in self.group_plans():
            yield hyperparameters, [plan.layout.optimizer_name for plan in plans]

    def group_plans(self) -> Iterator[tuple[Hyperparameters, list[ParameterPlan]]]:
        """Hyperparameters and plans, a group."""
        for group in self.adapter.groups():
            yield group.hyperparameters, [self.plans[id(parameter)] for parameter in group.parameters]


def optimizer_parts(optimizer: Any, planned: list[Planned]) -> list[OptimizerPart]:
    """The optimizer's parts, over parameters of this model.

    Raises:
        ConfigurationError: It updates a parameter that the model does not have.
    """
    plans: dict[int, ParameterPlan] = {}
    for item in planned:
        plans.setdefault(id(item.tensor), item.plan)  # tied weights: the first name, as Megatron names them
    parts = [OptimizerPart(adapter, plans) for adapter in adapters_for(optimizer)]
    for part in parts:
        for group in part.adapter.groups():
            strangers = [tuple(p.shape) for p in group.parameters if id(p) not in plans]
            if strangers:
                raise ConfigurationError(
                    expected="an optimizer over this model's parameters",
                    found=f"{len(strangers)} others, the first of shape {strangers[0]}",
                    remedy="Pass the model and the optimizer that were built together.",
                )
    return parts


def optimizer_holdings(
    parts: list[OptimizerPart], vocabulary_size: int | None = None
) -> tuple[list[Holding], list[str]]:
    """Blocks of every slot, and the names of parameters that have elements here but no state."""
    holdings: list[Holding] = []
    stateless: list[str] = []
    for part in parts:
        for parameter, plan in part.parameters():
            slots = part.adapter.slots(parameter)
            if not slots and plan.pieces:
                stateless.append(plan.layout.optimizer_name)
            for name, slot in slots.items():
                holdings.extend(_slot_blocks(plan, name, slot, vocabulary_size))
    return holdings, stateless


def _slot_blocks(plan: ParameterPlan, name: str, slot: Slot, vocabulary_size: int | None) -> Iterator[Holding]:
    def key_of(component: Component) -> str:
        return plan.slot_key(component, name)

    dtype = dtype_name(slot.tensor.dtype)
    if slot.kind == "sharded":
        yield from _blocks(plan, key_of, dtype, slot.tensor, vocabulary_size)
        return
    entry = KeyEntry(dtype=dtype, shape=(), kind=slot.kind, family=_family(plan))
    by_component = {piece.component: piece for piece in sorted(plan.pieces, key=lambda piece: piece.is_origin)}
    for component, piece in by_component.items():
        yield Holding(key_of(component), entry, piece, slot.tensor, plan)


def _blocks(
    plan: ParameterPlan,
    key_of: Callable[[Component], str],
    dtype: str,
    flat: torch.Tensor,
    vocabulary_size: int | None,
) -> Iterator[Holding]:
    tokens = vocabulary_size if plan.layout.is_vocabulary else None
    entries = {
        component: KeyEntry(
            dtype=dtype,
            shape=component.global_shape,
            family=_family(plan),
            component=component.suffix.lstrip("._") or component.module,
            unpadded_rows=tokens if tokens and tokens <= component.global_shape[0] else None,
        )
        for component in plan.components
    }
    for piece in plan.pieces:
        yield Holding(key_of(piece.component), entries[piece.component], piece, flat, plan)


def _family(plan: ParameterPlan) -> str | None:
    return f"{plan.claim.family}/{plan.claim.version}" if plan.claim else None
