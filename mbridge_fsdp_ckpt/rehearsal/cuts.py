"""What data-parallel ranks have of a parameter: planned by `plan.pieces`, once for parameters cut alike."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mbridge_fsdp_ckpt.families.declaration import Claim
from mbridge_fsdp_ckpt.plan.boxes import FlatRange
from mbridge_fsdp_ckpt.plan.layout import ParameterLayout
from mbridge_fsdp_ckpt.plan.pieces import Component, plan_parameter
from mbridge_fsdp_ckpt.rehearsal.records import record_bytes
from mbridge_fsdp_ckpt.rehearsal.shards import Item

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cuts:
    """What data-parallel ranks have of one component, by their number; one number where each has all of it.

    Args:
        component: The component.
        is_replicated: Whether each tensor-parallel rank holds these very elements, although the parameter is cut.
        blocks: How many blocks each has.
        bytes: Of these blocks' records, with the weight and the slots that are cut like it.
        origins: How many of the blocks hold the component's first element.
    """

    component: Component
    is_replicated: bool
    blocks: Counts
    bytes: Counts
    origins: Counts


class Cutter:
    """Plans parameters, each kind once."""

    def __init__(self) -> None:
        self._known: dict[Any, list[Cuts]] = {}

    def cut(
        self, layout: ParameterLayout, claim: Claim | None, item: Item | None, dtypes: tuple[torch.dtype, ...]
    ) -> list[Cuts]:
        """A parameter's cuts, by component.

        Args:
            layout: Of a rank whose coordinates are all zero.
            claim: How a family splits it.
            item: Its place in a bucket; None where every rank has all of it.
            dtypes: Of the weight, and of the slots that are cut like it.
        """
        place = item and item.place
        kind = layout.local_shape, layout.tensor_parallel, layout.tensor_parallel_dim, claim, place, dtypes
        if kind not in self._known:
            self._known[kind] = list(_cuts(layout, claim, item, dtypes))
        return self._known[kind]


def _cuts(
    layout: ParameterLayout, claim: Claim | None, item: Item | None, dtypes: tuple[torch.dtype, ...]
) -> Iterator[Cuts]:
    ranks = 1 if item is None else item.ranks
    held = [(0, FlatRange(0, math.prod(layout.local_shape)))] if item is None else item.parts()
    found: dict[tuple[Component, bool], Cuts] = {}
    for rank, flat in held:
        for piece in plan_parameter(replace(layout, flat=flat), claim).pieces:
            # pieces of a parameter that is cut have more replicas than it where tensor-parallel ranks are such
            name = piece.component, piece.replica.count != layout.replica.count
            cuts = found.setdefault(name, Cuts(*name, *(np.zeros(ranks, dtype=np.int64) for _ in range(3))))
            cuts.blocks[rank] += 1
            cuts.bytes[rank] += sum(record_bytes(piece.box.size, dtype) for dtype in dtypes)
            cuts.origins[rank] += piece.is_origin
    yield from found.values()
