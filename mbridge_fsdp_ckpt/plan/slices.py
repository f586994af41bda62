# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Parameters x families -> this rank's plan: which rows of which component it holds, and who writes them.

A plan is integers and names; it knows nothing of values and may be cached as long as the model's structure stands.
Each parameter has one set of slices; the model weight and every sharded optimizer slot follow it.

    fused parameter (8, 3) on TP rank 1 of 2, components _w (4 rows here) and _v (4 rows here), shard = rows 2..5

        local row      0   1 | 2   3   4   5 | 6   7
        component      _w  _w  _w  _w  _v  _v  _v  _v
        this shard             ^^^^^^  ^^^^^^
        global box             _w (6,0)+(2,3)   _v (4,0)+(2,3)       of components shaped (8, 3)
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mbridge_fsdp_ckpt.families.declaration import Claim, Segment
from mbridge_fsdp_ckpt.plan.boxes import Box, FlatRange, Shape, whole
from mbridge_fsdp_ckpt.plan.keys import MODEL_PREFIX, slot_key
from mbridge_fsdp_ckpt.plan.layout import Axis, HeldBox, ParameterLayout


@dataclass(frozen=True, slots=True)
class Component:
    """One logical tensor of a parameter.

    Args:
        suffix: What its keys on disk end with; empty for a parameter that is not fused.
        global_shape: Shape over all ranks.
        module: What its keys call the module that owns the parameter; empty where they call it by its name.
    """

    suffix: str
    global_shape: Shape
    module: str = ""

    def name_of(self, parameter: str) -> str:
        """The parameter's name, changed to this component's."""
        if not self.module:
            return f"{parameter}{self.suffix}"
        *path, _, leaf = parameter.split(".")
        return ".".join((*path, self.module, leaf)) + self.suffix


@dataclass(frozen=True, slots=True)
class Slice:
    """A block of a component that this rank holds.

    Args:
        component: The component.
        box: The block, in the global component.
        source: The part of this rank's flattened shard that it lies in.
        outer: Shape of that part.
        inner: The block, in that part.
        replica: This rank's place among those that hold the very same block.
        writes: Whether this rank is the one of them that writes it; see `owner`, and `shares` for a model's parameters.
    """

    component: Component
    box: Box
    source: FlatRange
    outer: Shape
    inner: Box
    replica: Axis
    writes: bool

    @property
    def is_origin(self) -> bool:
        """Whether it holds the component's first element, or would: exactly one writer's slice does."""
        return not any(self.box.offset) and (self.box.volume > 0 or not math.prod(self.component.global_shape))

    @property
    def has_elements(self) -> bool:
        """Whether it stands for elements, or for a tensor that has none; not for a parameter's numbers alone."""
        return self.box.volume > 0 or self.is_origin

    @property
    def rows(self) -> int:
        """How many rows it can be cut into, along its first dimension that is longer than one."""
        return self.box.size[self._cut_along] if self.box.size else 1

    @property
    def _cut_along(self) -> int:
        return next((dim for dim, size in enumerate(self.box.size) if size > 1), 0)

    def part(self, begin: int, end: int) -> Slice:
        """Rows [begin, end) of it."""
        if (begin, end) == (0, self.rows):
            return self
        dim = self._cut_along
        box, inner = (block.part(dim, begin, end) for block in (self.box, self.inner))
        return replace(self, box=box, inner=inner)

    def block(self, shard: Any) -> Any:
        """The block as a view of the flattened shard, an array or tensor; shaped as the box."""
        outer = shard[self.source.start : self.source.stop].reshape(self.outer)
        return outer if self.is_row else outer[self.inner.slices_in(whole(self.outer))]

    @property
    def is_row(self) -> bool:
        """Whether it is all of that part: its elements lie in a row."""
        return self.inner.size == self.outer


@dataclass(frozen=True, eq=False)
class ParameterPlan:
    """The slices of one parameter on this rank.  Kept from save to save: one is the same as another if it is that one.

    Args:
        layout: Where the shard lies.
        claim: The family that split it, if any.
        components: All components, whether this rank holds some of them or not.
        slices: What this rank holds, in source order.
    """

    layout: ParameterLayout
    claim: Claim | None
    components: tuple[Component, ...]
    slices: tuple[Slice, ...]

    @cached_property
    def writes_first(self) -> bool:
        """Whether this rank writes the parameter's first element: over all ranks, one does."""
        return any(
            slice_.writes and slice_.is_origin and slice_.component == self.components[0] for slice_ in self.slices
        )

    def model_key(self, component: Component) -> str:
        """Key on disk of the weight."""
        return f"{MODEL_PREFIX}{component.name_of(self.layout.key)}"

    def slot_key(self, component: Component, slot: str) -> str:
        """Key on disk of an optimizer slot."""
        return slot_key(self.state_name(component), slot)

    def state_name(self, component: Component) -> str:
        """Name in the optimizer's state."""
        return component.name_of(self.layout.optimizer_name)


def plan_parameter(layout: ParameterLayout, claim: Claim | None) -> ParameterPlan:
    """Plan one parameter.

    Args:
        layout: Its layout on this rank.
        claim: How a family splits one dimension, on one tensor-parallel rank; None keeps it whole.
    """
    strands = tuple(_strands(layout, claim))
    components = dict.fromkeys(strand.component for strand in strands)
    return ParameterPlan(layout, claim, tuple(components), tuple(_slices(layout, strands)))


def owner(key: str, replicas: int) -> int:
    """Which replica writes a tensor, where nothing else says: spread over them by the key's hash."""
    return zlib.crc32(key.encode()) % replicas


@dataclass(frozen=True, slots=True)
class _Strand:
    """A segment with its place: `source` in the parameter and `target` in the component, of one TP rank."""

    component: Component
    source: Box
    target: Box
    shape: Shape


def _strands(layout: ParameterLayout, claim: Claim | None) -> Iterator[_Strand]:
    shape = layout.local_shape
    if claim is None:
        yield _Strand(Component("", layout.global_shape_of(shape)), whole(shape), whole(shape), shape)
        return
    rows: dict[tuple[str, str], int] = {}
    for segment in claim.segments:
        rows[_identity(segment)] = rows.get(_identity(segment), 0) + segment.rows
    filled, start = dict.fromkeys(rows, 0), 0
    for segment in claim.segments:
        local = (rows[_identity(segment)], *shape[1:])
        component = Component(segment.suffix, layout.global_shape_of(local), segment.module)
        size, zeros = (segment.rows, *shape[1:]), (0,) * (len(shape) - 1)
        source, target = (start, *zeros), (filled[_identity(segment)], *zeros)
        yield _Strand(component, Box(source, size), Box(target, size), local)
        start += segment.rows
        filled[_identity(segment)] += segment.rows


def _identity(segment: Segment) -> tuple[str, str]:
    return segment.module, segment.suffix


def _slices(layout: ParameterLayout, strands: tuple[_Strand, ...]) -> Iterator[Slice]:
    if not math.prod(layout.local_shape):
        yield from _empty_slices(layout, strands)
    elif layout.box_set is not None and not layout.box_set.boxes:
        yield _numbers_alone(layout, strands[0].component)
    for held in layout.held():
        for strand in strands:
            common = held.box.intersect(strand.source)
            if common is None:
                continue
            source, shape, inner = _place(common, held)
            writes = _writes(layout, strand.component, layout.replica)
            box = _to_global(_moved(common, strand), strand, layout)
            yield Slice(strand.component, box, source, shape, inner, layout.replica, writes)


def _empty_slices(layout: ParameterLayout, strands: tuple[_Strand, ...]) -> Iterator[Slice]:
    """A tensor without elements has a key all the same, and is whole on every rank: nothing of it can be cut."""
    cut = layout.tensor_parallel_dim is not None
    replica = layout.replica.within(layout.tensor_parallel) if cut else layout.replica
    for component in dict.fromkeys(strand.component for strand in strands):
        box, writes = whole(component.global_shape), _writes(layout, component, replica)
        yield Slice(component, box, FlatRange(0, 0), box.size, box, replica, writes)


def _numbers_alone(layout: ParameterLayout, component: Component) -> Slice:
    """A DTensor's optimizer keeps state of an empty shard, too: no elements, but a step counter."""
    nothing = whole((0,) * len(component.global_shape))
    return Slice(component, nothing, FlatRange(0, 0), nothing.size, nothing, layout.replica, writes=False)


def _writes(layout: ParameterLayout, component: Component, replica: Axis) -> bool:
    return not layout.is_copy and replica.index == owner(component.name_of(layout.key), replica.count)


def _place(common: Box, held: HeldBox) -> tuple[FlatRange, Shape, Box]:
    """Where a block of a held box lies: part of the flattened local tensor, its shape, the block in it."""
    moved = zip(common.offset, held.box.offset, held.inner.offset, strict=True)
    inner = Box(tuple(a - b + c for a, b, c in moved), common.size)
    if common.size[1:] != held.outer[1:]:
        return held.source, held.outer, inner
    first = held.source.start + (inner.offset[0] * math.prod(common.size[1:]) if common.size else 0)
    return FlatRange(first, first + common.volume), common.size, whole(common.size)


def _moved(box: Box, strand: _Strand) -> Box:
    """A block of the parameter, in the component."""
    places = zip(box.offset, strand.source.offset, strand.target.offset, strict=True)
    return Box(tuple(offset - source + target for offset, source, target in places), box.size)


def _to_global(box: Box, strand: _Strand, layout: ParameterLayout) -> Box:
    dim = layout.tensor_parallel_dim
    if dim is None:
        return box
    shifted = box.offset[dim] + layout.tensor_parallel.index * strand.shape[dim]
    return Box((*box.offset[:dim], shifted, *box.offset[dim + 1 :]), box.size)
