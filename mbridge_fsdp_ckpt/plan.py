"""Parameters x families -> this rank's plan: which rows of which component it holds, and who writes them.

A plan is integers and names; it knows nothing of values and may be cached as long as the model's structure stands.
Each parameter has one set of pieces; the model weight and every sharded optimizer slot follow it.

    fused parameter (8, 3) on TP rank 1 of 2, components _w (4 rows here) and _v (4 rows here), shard = rows 2..5

        local row      0   1 | 2   3   4   5 | 6   7
        component      _w  _w  _w  _w  _v  _v  _v  _v
        this shard             ^^^^^^  ^^^^^^
        global box             _w (6,0)+(2,3)   _v (4,0)+(2,3)       of components shaped (8, 3)
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mbridge_fsdp_ckpt.families.registry import Claim
from mbridge_fsdp_ckpt.geometry import Box, FlatRange, Shape, boxes_of
from mbridge_fsdp_ckpt.parameters import ParameterLayout


@dataclass(frozen=True, slots=True)
class Component:
    """One logical tensor of a parameter.

    Args:
        suffix: What its keys on disk end with; empty for a parameter that is not fused.
        global_shape: Shape over all ranks.
    """

    suffix: str
    global_shape: Shape


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a component that this rank holds.

    Args:
        suffix: The component.
        box: The block, in the global component.
        source: The same elements in this rank's flattened shard.
    """

    suffix: str
    box: Box
    source: FlatRange

    @property
    def is_origin(self) -> bool:
        """Whether it holds the component's first element: exactly one writer's piece does."""
        return self.box.volume > 0 and not any(self.box.offset)


@dataclass(frozen=True, slots=True)
class ParameterPlan:
    """The pieces of one parameter on this rank.

    Args:
        layout: Where the shard lies.
        claim: The family that split it, if any.
        components: All components, whether this rank holds some of them or not.
        pieces: What this rank holds, in source order.
        writes: Whether this rank is the one that writes them; its replicas don't.
    """

    layout: ParameterLayout
    claim: Claim | None
    components: tuple[Component, ...]
    pieces: tuple[Piece, ...]
    writes: bool

    def model_key(self, suffix: str) -> str:
        """Key on disk of the weight."""
        return f"model.{self.layout.key}{suffix}"

    def slot_key(self, suffix: str, slot: str) -> str:
        """Key on disk of an optimizer slot, as stock `fsdp_dtensor` names it."""
        return f"optimizer.state.{self.layout.optimizer_name}{suffix}.{slot}"


def plan_parameter(layout: ParameterLayout, claim: Claim | None) -> ParameterPlan:
    """Plan one parameter.

    Args:
        layout: Its layout on this rank.
        claim: How a family splits dimension 0, on one tensor-parallel rank; None keeps it whole.
    """
    rows_of = _rows_by_suffix(layout, claim)
    components = tuple(
        Component(suffix, layout.global_shape_of(_with_rows(layout.local_shape, rows)))
        for suffix, rows in rows_of.items()
    )
    pieces = tuple(_pieces(layout, claim, rows_of))
    return ParameterPlan(layout, claim, components, pieces, layout.replica.index == owner(layout))


def owner(layout: ParameterLayout) -> int:
    """Which replica writes a parameter: spread over them by the key's hash, so that no rank writes last and most."""
    return zlib.crc32(layout.key.encode()) % layout.replica.count


def _rows_by_suffix(layout: ParameterLayout, claim: Claim | None) -> dict[str, int]:
    if claim is None:
        return {"": layout.local_shape[0] if layout.local_shape else 1}
    rows: dict[str, int] = {}
    for segment in claim.segments:
        rows[segment.suffix] = rows.get(segment.suffix, 0) + segment.rows
    return rows


def _with_rows(shape: Shape, rows: int) -> Shape:
    return (rows, *shape[1:]) if shape else shape


def _pieces(layout: ParameterLayout, claim: Claim | None, rows_of: dict[str, int]) -> Iterator[Piece]:
    for suffix, source, component in _segments(layout, claim):
        common = layout.flat.intersect(source)
        if common is None:
            continue
        inside = common.shift(component - source.start)  # in the TP-local component
        local_shape = _with_rows(layout.local_shape, rows_of[suffix])
        for box, part in boxes_of(inside, local_shape):
            held = part.shift(source.start - component - layout.flat.start)
            yield Piece(suffix, _to_global(box, local_shape, layout), held)


def _segments(layout: ParameterLayout, claim: Claim | None) -> Iterator[tuple[str, FlatRange, int]]:
    """Suffix, flat range in the fused parameter, flat start in the component; all on one tensor-parallel rank."""
    if claim is None:
        yield "", FlatRange(0, math.prod(layout.local_shape)), 0
        return
    row = math.prod(layout.local_shape[1:])
    start, filled = 0, dict.fromkeys((segment.suffix for segment in claim.segments), 0)
    for segment in claim.segments:
        stop = start + segment.rows * row
        yield segment.suffix, FlatRange(start, stop), filled[segment.suffix]
        filled[segment.suffix] += segment.rows * row
        start = stop


def _to_global(box: Box, local_shape: Shape, layout: ParameterLayout) -> Box:
    dim = layout.tensor_parallel_dim
    if dim is None:
        return box
    shifted = box.offset[dim] + layout.tensor_parallel.index * local_shape[dim]
    return Box((*box.offset[:dim], shifted, *box.offset[dim + 1 :]), box.size)


def volume(plans: Iterable[ParameterPlan]) -> int:
    """Elements this rank writes for one tensor a parameter."""
    return sum(piece.box.volume for plan in plans if plan.writes for piece in plan.pieces)
