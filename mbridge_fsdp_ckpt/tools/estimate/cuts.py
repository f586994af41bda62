# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What data-parallel ranks have of a parameter: planned by `plan.slices`, once for parameters cut alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mbridge_fsdp_ckpt.families.declaration import Claim
from mbridge_fsdp_ckpt.plan.boxes import FlatRange
from mbridge_fsdp_ckpt.plan.layout import ParameterLayout
from mbridge_fsdp_ckpt.plan.slices import Component, Slice, plan_parameter
from mbridge_fsdp_ckpt.tools.estimate.records import Records, records_in
from mbridge_fsdp_ckpt.tools.estimate.shards import Item

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Blocks:
    """The first block of each data-parallel rank that has one, or the second, and so on.

    Args:
        ranks: These ranks, by their number.
        slices: The blocks.
        volumes: Elements of each.
        bytes: Of each one's records, with the weight and the slots that are cut like it.
        records: How many these are.
        origins: 1 for a block that holds the component's first element, else 0.
    """

    ranks: Counts
    slices: tuple[Slice, ...]
    volumes: Counts
    bytes: Counts
    records: Counts
    origins: Counts


@dataclass(frozen=True, slots=True)
class Cuts:
    """What data-parallel ranks have of one component, by their number; one number where each has all of it.

    Args:
        component: The component.
        is_replicated: Whether each tensor-parallel rank holds these very elements, although the parameter is cut.
        blocks: What they have, in the order in which each has it.
    """

    component: Component
    is_replicated: bool
    blocks: tuple[Blocks, ...]


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


def slice_records(slice_: Slice, dtypes: tuple[torch.dtype, ...]) -> Records:
    """Those of a block, in each dtype."""
    found = [records_in(slice_.box.size, dtype) for dtype in dtypes]
    return Records(sum(some.bytes for some in found), sum(some.chunks for some in found))


def _cuts(
    layout: ParameterLayout, claim: Claim | None, item: Item | None, dtypes: tuple[torch.dtype, ...]
) -> Iterator[Cuts]:
    held = [(0, FlatRange(0, math.prod(layout.local_shape)))] if item is None else item.parts()
    found: dict[tuple[Component, bool], dict[int, list[Slice]]] = {}
    for rank, flat in held:
        for slice_ in plan_parameter(replace(layout, flat=flat), claim).slices:
            # slices of a parameter that is cut have more replicas than it where tensor-parallel ranks are such
            name = slice_.component, slice_.replica.count != layout.replica.count
            found.setdefault(name, {}).setdefault(rank, []).append(slice_)
    for name, slices in found.items():
        yield Cuts(*name, tuple(_blocks(slices, dtypes)))


def _blocks(slices: Mapping[int, list[Slice]], dtypes: tuple[torch.dtype, ...]) -> Iterator[Blocks]:
    for number in count():
        there = {rank: held[number] for rank, held in slices.items() if len(held) > number}
        if not there:
            return
        records = [slice_records(slice_, dtypes) for slice_ in there.values()]
        columns = (
            there.keys(),
            (slice_.box.volume for slice_ in there.values()),
            (some.bytes for some in records),
            (some.chunks for some in records),
            (slice_.is_origin for slice_ in there.values()),
        )
        ranks, *numbers = (np.fromiter(column, dtype=np.int64, count=len(there)) for column in columns)
        yield Blocks(ranks, tuple(there.values()), *numbers)
