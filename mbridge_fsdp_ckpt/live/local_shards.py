# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a rank holds for a checkpoint: keys, boxes and the tensors behind them.

A rank holds slices of few of a large model's parameters: the others are only named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch

from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.live.optimizer.base import Grouped, OptimizerAdapter, Slot, unless_known
from mbridge_fsdp_ckpt.live.planned import Planned
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.dtypes import dtype_name
from mbridge_fsdp_ckpt.plan.keys import KeyEntry, Kind
from mbridge_fsdp_ckpt.plan.slices import Component, ParameterPlan, Slice

KeyFilter = Callable[[str], bool]


class LocalShard(NamedTuple):
    """One tensor's block on this rank.

    Args:
        key: Key on disk.
        entry: The key's global description.
        slice: The block; for a scalar, the one that declares the key, if this rank has that one.
        flat: The flattened local shard that the slice's source indexes, or the scalar.
        plan: The parameter it belongs to.
        is_buffer: Whether it is a buffer: a forward pass may change it.
        kept: The tensor that the model or the optimizer keeps; None for a number that is none.
    """

    key: str
    entry: KeyEntry
    slice_: Slice
    flat: torch.Tensor
    plan: ParameterPlan
    is_buffer: bool = False
    kept: torch.Tensor | None = None

    @property
    def is_scalar(self) -> bool:
        """Whether the tensor is one number of the parameter."""
        return self.entry.kind != "sharded"

    @property
    def declares(self) -> bool:
        """Whether it counts for the plan: every shard has the parameter's numbers, one declares them."""
        return self.slice_.is_origin or not self.is_scalar

    @property
    def box(self) -> Box:
        """The block, in the global tensor."""
        return Box((), ()) if self.is_scalar else self.slice_.box

    def elements(self) -> torch.Tensor:
        """The block's elements, flat: a view where they lie in a row."""
        slice_ = self.slice_
        if self.is_scalar:
            return self.flat.reshape(-1)
        if slice_.is_row:
            return self.flat[slice_.source.start : slice_.source.stop]
        block: torch.Tensor = slice_.block(self.flat)
        return block.reshape(-1)


def model_shards(
    planned: list[Planned], include: KeyFilter | None = None, vocabulary_size: int | None = None
) -> Iterator[LocalShard]:
    """The weights and buffers.

    Args:
        planned: The model.
        include: Filters by the model's own key.
        vocabulary_size: Rows of the vocabulary without its padding, where known.
    """
    for item in planned:
        if item.plan.slices and (include is None or include(item.plan.layout.key)):
            named = _blocks(item.plan, None, _Kept(dtype_name(item.tensor.dtype)), vocabulary_size)
            flat, kept = item.elements(), item.tensor
            for key, entry, slice_ in named:
                if slice_.has_elements:
                    yield LocalShard(key, entry, slice_, flat, item.plan, item.is_buffer, kept)


@dataclass(frozen=True, slots=True)
class OptimizerPart:
    """One torch optimizer with the plans of its parameters, by param group."""

    adapter: OptimizerAdapter
    groups: list[list[tuple[torch.Tensor, ParameterPlan]]]

    def only(self, include: KeyFilter) -> OptimizerPart:
        """The same without parameters whose key is filtered out; all groups are there, if without any."""
        groups = [[item for item in group if include(item[1].layout.key)] for group in self.groups]
        return OptimizerPart(self.adapter, groups)

    def parameters(self) -> Iterator[tuple[torch.Tensor, ParameterPlan]]:
        """Its parameters with their plans."""
        return chain.from_iterable(self.groups)

    def group_plans(self) -> Iterator[list[ParameterPlan]]:
        """The plans of each group."""
        for group in self.groups:
            yield [plan for _, plan in group]

    def group_names(self) -> Iterator[list[str]]:
        """The optimizer names of each group."""
        for plans in self.group_plans():
            yield [plan.layout.optimizer_name for plan in plans]


def holds_some(plans: Iterable[ParameterPlan]) -> bool:
    """Whether this rank holds something of a param group."""
    return any(plan.slices for plan in plans)


def optimizer_parts(optimizers: Iterable[Grouped], planned: list[Planned]) -> list[OptimizerPart]:
    """What optimizers update (`grouped`), over parameters of this model.

    Raises:
        ConfigurationError: It updates a parameter that the model does not have.
    """
    plans = {id(item.tensor): item.plan for item in reversed(planned)}  # tied: the first name, as Megatron names them
    parts = []
    for adapter, groups in optimizers:
        strangers = [p for group in groups for p in group.parameters if id(p) not in plans]
        if strangers:
            raise ConfigurationError(
                expected="an optimizer over this model's parameters",
                found=f"{len(strangers)} others, the first of shape {tuple(strangers[0].shape)}",
                remedy="Pass the model and the optimizer that were built together.",
            )
        parts.append(OptimizerPart(adapter, [[(p, plans[id(p)]) for p in group.parameters] for group in groups]))
    return parts


def optimizer_shards(
    parts: list[OptimizerPart], vocabulary_size: int | None = None
) -> tuple[list[LocalShard], list[str]]:
    """Blocks of every slot, and the names of parameters that have elements here but no state."""
    shards: list[LocalShard] = []
    stateless: list[str] = []
    for part in parts:
        for parameter, plan in part.parameters():
            slots = part.adapter.slots(parameter) if plan.slices else {}
            if not slots and any(slice_.has_elements for slice_ in plan.slices):
                stateless.append(plan.layout.optimizer_name)
            kept_by = part.adapter.class_name(parameter) if slots else ""
            for name, slot in slots.items():
                flat = slot.tensor
                for key, entry, slice_ in _blocks(plan, name, _Kept.of(slot, kept_by), vocabulary_size):
                    if slice_.has_elements or slot.kind != "sharded":
                        shards.append(LocalShard(key, entry, slice_, flat, plan, kept=slot.kept))
    return shards, stateless


class _Kept(NamedTuple):
    """What a key's description says of the tensor: fields of `KeyEntry`."""

    dtype: str
    kind: Kind = "sharded"
    kept_as: str | None = None
    kept_by: str | None = None

    @staticmethod
    def of(slot: Slot, kept_by: str) -> _Kept:
        """The description of a slot.

        Classes whose slots are known are not named, because ranks may use different ones of them.
        """
        kept_as = slot.tensor.dtype if slot.scaled_from is None else slot.scaled_from
        return _Kept(dtype_name(slot.tensor.dtype), slot.kind, dtype_name(kept_as), unless_known(kept_by))


@lru_cache(maxsize=1 << 16)
def _blocks(
    plan: ParameterPlan, slot: str | None, kept: _Kept, vocabulary_size: int | None
) -> tuple[tuple[str, KeyEntry, Slice], ...]:
    """What a rank holds of a parameter's weight, or of a slot: keys, their descriptions, and blocks.

    Kept, so that a later save makes nothing of it anew.
    """

    def key_of(component: Component) -> str:
        return plan.model_key(component) if slot is None else plan.slot_key(component, slot)

    if kept.kind != "sharded":
        number = KeyEntry(shape=(), family=_family(plan), **kept._asdict())
        by_component = {slice_.component: slice_ for slice_ in sorted(plan.slices, key=lambda slice_: slice_.is_origin)}
        return tuple((key_of(component), number, slice_) for component, slice_ in by_component.items())
    tokens = vocabulary_size if plan.layout.is_vocabulary else None
    entries = {component: _entry(kept, component, _family(plan), tokens) for component in plan.components}
    keys = {component: key_of(component) for component in plan.components}
    return tuple((keys[slice_.component], entries[slice_.component], slice_) for slice_ in plan.slices)


@lru_cache(maxsize=1 << 16)
def _entry(kept: _Kept, component: Component, family: str | None, tokens: int | None) -> KeyEntry:
    return KeyEntry(
        shape=component.global_shape,
        family=family,
        component=component.suffix.lstrip("._") or component.module,
        unpadded_rows=tokens if tokens and tokens <= component.global_shape[0] else None,
        **kept._asdict(),
    )


def _family(plan: ParameterPlan) -> str | None:
    return f"{plan.claim.family}/{plan.claim.version}" if plan.claim else None
