"""What a rank holds for a checkpoint: keys, boxes and the tensors behind them.

Planning is arithmetic, and its result is kept for as long as all stands that it was made from (`marks`); tensors are
looked up anew each time.  A rank holds pieces of few of a large model's parameters: the others are only named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.families.registry import default_registry
from mbridge_fsdp_ckpt.live.marks import Marks, marks_of
from mbridge_fsdp_ckpt.live.megatron_fsdp import (
    ModelParameter,
    local_shard,
    model_parameters,
    refuse_quantized,
    tensors_of,
)
from mbridge_fsdp_ckpt.live.optimizer.adapters import adapters_for
from mbridge_fsdp_ckpt.live.optimizer.base import Hyperparameters, OptimizerAdapter, Slot
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.dtypes import dtype_name
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.plan.pieces import Component, ParameterPlan, Piece, plan_parameter
from mbridge_fsdp_ckpt.plan.shares import shared_out

KeyFilter = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Planned:
    """A parameter or buffer of the model with its plan."""

    plan: ParameterPlan
    tensor: torch.Tensor
    """The parameter that the optimizer updates, the main weight; or a persistent buffer."""
    is_buffer: bool
    """Whether it is a buffer: whole on every rank that has it, of any strides."""

    def elements(self) -> torch.Tensor:
        """This rank's shard, flattened, to be read: a copy of a buffer that cannot be flattened in place.

        Raises:
            UnsupportedStateError: See `refuse_quantized`.
        """
        shard = local_shard(self.tensor)
        refuse_quantized(shard, self.plan.layout.key)
        return shard.reshape(-1)


@dataclass(frozen=True, slots=True)
class Holding:
    """One tensor's block on this rank.

    Args:
        key: Key on disk.
        entry: The key's global description.
        piece: The block; for a scalar, the one that declares the key, if this rank has that one.
        flat: The flattened local shard that the piece's source indexes, or the scalar.
        plan: The parameter it belongs to.
        is_buffer: Whether it is a buffer: a forward pass may change it.
    """

    key: str
    entry: KeyEntry
    piece: Piece
    flat: torch.Tensor
    plan: ParameterPlan
    is_buffer: bool = False

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


@dataclass(frozen=True, slots=True)
class _Known:
    """The plans of a model's tensors, and whether each is a buffer; and what they were made from."""

    marks: Marks
    plans: tuple[tuple[ParameterPlan, bool], ...]


_known: WeakKeyDictionary[object, _Known] = WeakKeyDictionary()


def plan_model(module: Any) -> list[Planned]:
    """Plan every parameter and persistent buffer of a `MegatronFSDP` module; not twice while its structure stands.

    Raises:
        LayoutError, FamilyError: See `model_parameters`, `FamilyRegistry`.
    """
    tensors = tensors_of(module)
    marks, known = marks_of(module, tensors), _known.get(module)
    if known is None or known.marks != marks:
        known = _known[module] = _Known(marks, tuple(_plans(model_parameters(module))))
    return [
        Planned(plan, tensor, is_buffer)
        for (plan, is_buffer), tensor in zip(known.plans, tensors.values(), strict=True)
    ]


def _plans(tensors: list[ModelParameter]) -> Iterator[tuple[ParameterPlan, bool]]:
    """Each tensor's plan, and whether it is a buffer.

    Ranks share out what they hold of parameters.  Which buffers a rank has may depend on what it has computed: each of
    them has a writer of its own (`plan.pieces.owner`).
    """
    plans = list(map(_plan, tensors))
    parameters = [(plan, tensor) for plan, tensor in zip(plans, tensors, strict=True) if tensor.context is not None]
    shared = iter(shared_out([plan for plan, _ in parameters], [tensor.bytes_per_element for _, tensor in parameters]))
    for plan, tensor in zip(plans, tensors, strict=True):
        yield (plan, True) if tensor.context is None else (next(shared), False)


def _plan(parameter: ModelParameter) -> ParameterPlan:
    claim = default_registry().claim(parameter.context) if parameter.context else None
    return plan_parameter(parameter.layout, claim)


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
        if item.plan.pieces and (include is None or include(item.plan.layout.key)):
            dtype = dtype_name(item.tensor.dtype)
            blocks = _blocks(item.plan, item.plan.model_key, dtype, item.elements(), vocabulary_size)
            yield from (replace(block, is_buffer=True) for block in blocks) if item.is_buffer else blocks


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

    def held_groups(self) -> Iterator[tuple[Hyperparameters, list[ParameterPlan]]]:
        """Hyperparameters and plans of the groups of which this rank holds something."""
        for hyperparameters, plans in self.group_plans():
            if any(plan.pieces for plan in plans):
                yield hyperparameters, plans

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
            slots = part.adapter.slots(parameter) if plan.pieces else {}
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
    entries = {component: _entry(dtype, component, _family(plan), tokens) for component in plan.components}
    for piece in plan.pieces:
        yield Holding(key_of(piece.component), entries[piece.component], piece, flat, plan)


@lru_cache(maxsize=1 << 16)
def _entry(dtype: str, component: Component, family: str | None, tokens: int | None) -> KeyEntry:
    return KeyEntry(
        dtype=dtype,
        shape=component.global_shape,
        family=family,
        component=component.suffix.lstrip("._") or component.module,
        unpadded_rows=tokens if tokens and tokens <= component.global_shape[0] else None,
    )


def _family(plan: ParameterPlan) -> str | None:
    return f"{plan.claim.family}/{plan.claim.version}" if plan.claim else None
