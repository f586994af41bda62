# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What the ranks of a job have to do: some of them planned as a save plans them, and all of them counted.

The ranks of a pipeline stage have the same parameters, which Megatron-FSDP cuts at other places.  The reader reads them
as one rank has them (`live.readers`).  Their layouts are moved to each data-parallel rank that holds a part, planned
there (`plan.slices`), and divided between the ranks that hold the same (`plan.shares`).  Along all other dimensions
ranks have as much to do as each other.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mbridge_fsdp_ckpt.families.declaration import Claim, ParameterContext
from mbridge_fsdp_ckpt.families.naming import is_expert_name
from mbridge_fsdp_ckpt.families.registry import default_registry
from mbridge_fsdp_ckpt.format.payload import record_length
from mbridge_fsdp_ckpt.live.local_shards import LocalShard
from mbridge_fsdp_ckpt.live.mesh import replicated_along
from mbridge_fsdp_ckpt.live.readers.megatron_fsdp import model_parameters
from mbridge_fsdp_ckpt.live.readers.protocol import ModelParameter
from mbridge_fsdp_ckpt.plan.boxes import FlatRange, Shape, whole
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name
from mbridge_fsdp_ckpt.plan.records import records_of
from mbridge_fsdp_ckpt.plan.shares import divide
from mbridge_fsdp_ckpt.plan.slices import Slice, owner, plan_parameter
from mbridge_fsdp_ckpt.saving.snapshot import observe, plan_save
from mbridge_fsdp_ckpt.tools.estimate.layout import DENSE, Ranks
from mbridge_fsdp_ckpt.tools.estimate.model import EstimatedModel, Item, Subject, as_expert_rank

Counts = npt.NDArray[np.int64]

_PARTS = {
    ".experts.": "experts",
    "embedding": "vocabulary",
    "output_layer": "vocabulary",
    "self_attention": "attention and mixers",
    ".mixer.": "attention and mixers",
    ".mlp.": "MLPs and routers",
}
OTHERS = "norms and others"


def record_lengths(size: Shape, *dtypes: torch.dtype) -> list[int]:
    """Bytes of each record of a block, in each dtype."""
    return [record_length(dtype, box.size) for dtype in dtypes for box in records_of(whole(size), dtype.itemsize)]


@dataclass(slots=True)
class Work[Number]:
    """What one rank has to do with a save and a load in the same layout.

    Args:
        bytes: Of its payload file.
        chunks: Records in it.
        blocks: What these are cut from.
        numbers: Numbers of which its value counts, such as step counters.
        keys: Keys of which it writes the first element.
        held_bytes: Of records that hold what it has, whoever writes them: what it reads in a load.
        held_blocks: How many blocks it has.
    """

    bytes: Number
    chunks: Number
    blocks: Number
    numbers: Number
    keys: Number
    held_bytes: Number
    held_blocks: Number


METRICS = tuple(each.name for each in fields(Work))
_OF_ORIGINS = ("numbers", "keys")
_HELD = METRICS.index("held_bytes")
"""Fields from here on count what a rank holds, those before it what it writes."""


class Tally(Work[Counts]):
    """What each rank has to do, by rank.

    Args:
        world: Ranks.
    """

    def __init__(self, world: int) -> None:
        super().__init__(*(np.zeros(world, dtype=np.int64) for _ in METRICS))
        self.world = world
        self.by_part: dict[str, Counts] = {}
        """Bytes that a rank writes, by the part of the model that they belong to."""

    def work(self, rank: int) -> Work[int]:
        """One rank's."""
        return Work(*(int(getattr(self, metric)[rank]) for metric in METRICS))

    def add(self, part: str, ranks: Ranks, counts: Counts) -> None:
        """Count what ranks have to do for a part of the model.

        Args:
            part: The part.
            ranks: See `JobLayout.replica_groups`.
            counts: By place in the replica group, data-parallel rank and metric: along all else, ranks do the same.
        """
        first = ranks[..., :1]  # tensor-parallel ranks after the first have later rows, or columns
        for metric, column in zip(METRICS, np.moveaxis(counts, 2, 0)[..., None, None], strict=True):
            getattr(self, metric)[first if metric in _OF_ORIGINS else ranks] += column
        of_part = self.by_part.setdefault(part, np.zeros(self.world, dtype=np.int64))
        of_part[ranks] += counts[..., :1, None]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """A rank's local shards.

    Args:
        shards: All, those that other ranks write among them.
        seconds: Of CPU, that planning them took the first time, and again.
    """

    shards: list[LocalShard]
    seconds: tuple[float, float]

    @property
    def work(self) -> Work[int]:
        """The local shards, counted."""
        own = [item for item in self.shards if item.slice_.writes]
        held = [item for item in self.shards if not item.is_scalar]
        written = [lengths_of(item) for item in held if item.slice_.writes]
        return Work(
            bytes=sum(map(sum, written)),
            chunks=sum(map(len, written)),
            blocks=len(written),
            numbers=len(own) - len(written),
            keys=len({item.key for item in own if item.slice_.is_origin}),
            held_bytes=sum(sum(lengths_of(item)) for item in held),
            held_blocks=len(held),
        )


def lengths_of(shard: LocalShard) -> list[int]:
    """Bytes of each record of a local shard."""
    return record_lengths(shard.box.size, dtype_from_name(shard.entry.dtype))


def plan_rank(subject: Subject) -> RankPlan:
    """Plan a rank's part of a save: that of the rank that this process passes for (`model.as_rank`).

    Raises:
        LayoutError, FamilyError: As a save does.
    """
    model = EstimatedModel(subject)
    optimizer = model.optimizer()
    seconds = []
    shards: list[LocalShard] = []
    gc.collect()  # what building the model has left behind is none of planning's cost
    for _ in range(2):  # the plan is kept for the next save
        start = time.process_time()
        shards = plan_save(observe(model, optimizer, None, None, None, subject.vocabulary_size)).shards
        seconds.append(time.process_time() - start)
    return RankPlan(shards, (seconds[0], seconds[1]))


def item_of(parameter: ModelParameter, subject: Subject) -> Item | None:
    """A parameter's place in a bucket; None where every data-parallel rank has all of it: of buffers, too."""
    if parameter.context is None or not math.prod(parameter.layout.local_shape):
        return None
    original: Any = parameter.tensor
    return subject.item(original.orig_param)


def parts_of(parameter: ModelParameter, subject: Subject) -> Iterator[tuple[int, FlatRange]]:
    """What each data-parallel rank holds that has some of a parameter; one of them, where each holds all of it."""
    item = item_of(parameter, subject)
    yield from [(0, FlatRange(0, math.prod(parameter.layout.local_shape)))] if item is None else item.parts()


def claim_of(parameter: ModelParameter) -> Claim | None:
    """How a family splits a parameter."""
    return default_registry().claim(parameter.context) if parameter.context is not None else None


def count_stage(subject: Subject, stage: int, tally: Tally) -> None:
    """Count all that the ranks of a pipeline stage hold; this process passes for its first one (`model.as_rank`).

    Raises:
        LayoutError, FamilyError: As a save does.
    """
    _Counter(subject, stage, tally).count()


type _ByRank = dict[int, list[tuple[ModelParameter, Sequence[Slice]]]]
"""What data-parallel ranks hold: parameters as a rank has them whose coordinates are all zero, and their slices."""


class _Counter:
    def __init__(self, subject: Subject, stage: int, tally: Tally) -> None:
        self._subject, self._stage, self._tally = subject, stage, tally
        self._model = EstimatedModel(subject)
        self._planned: dict[Any, list[tuple[int, Sequence[Slice]]]] = {}
        self._works: dict[Any, Counts] = {}

    def count(self) -> None:
        """Count all that the ranks hold."""
        alike: dict[tuple[bool, tuple[str, ...]], _ByRank] = {}
        for parameter in model_parameters(self._model):
            if parameter.context is not None:
                where = is_expert_name(parameter.context.name), self._along(parameter, parameter.context)
                for rank, slices in self._slices(parameter):
                    alike.setdefault(where, {}).setdefault(rank, []).append((parameter, slices))
        for (expert, along), by_rank in alike.items():
            self._count_alike(expert, along, by_rank)
        self._count_buffers()

    def _count_alike(self, expert: bool, along: tuple[str, ...], by_rank: _ByRank) -> None:
        """Count parameters that the same ranks hold; of empty ones, tensor-parallel ranks do, too."""
        ranks = [self._ranks(expert, where) for where in (along, (*along, "tensor"))]
        found: dict[tuple[str, bool], Counts] = {}
        for rank, held in by_rank.items():
            pairs = [(parameter.layout, slices) for parameter, slices in held]
            divided = divide(pairs, [parameter.bytes_per_element for parameter, _ in held])
            for (parameter, _), slices in zip(held, divided, strict=True):
                layout = parameter.layout
                for slice_, writer in slices:
                    part, is_replicated = _part(layout.key), slice_.replica.count != layout.replica.count
                    if (part, is_replicated) not in found:
                        found[part, is_replicated] = _no_work(ranks[is_replicated])
                    _add(found[part, is_replicated], rank, writer, self._work_of(slice_, parameter))
        for (part, is_replicated), counts in found.items():
            self._tally.add(part, ranks[is_replicated], counts)

    def _count_buffers(self) -> None:
        """Count buffers: whole on every rank of their mesh; experts are numbered over all expert-parallel ranks."""
        for expert in range(self._subject.layout.expert):
            with as_expert_rank(expert):
                buffers = [parameter for parameter in model_parameters(self._model) if parameter.context is None]
            of_experts = [buffer for buffer in buffers if is_expert_name(buffer.layout.key)]
            for buffer in of_experts if expert else buffers:
                self._count_buffer(buffer, expert)
            if not of_experts:
                return

    def _count_buffer(self, buffer: ModelParameter, expert: int) -> None:
        layout = buffer.layout
        ranks = self._ranks(is_expert_name(layout.key), DENSE)[:, :, expert : expert + 1]
        counts = _no_work(ranks)
        for slice_ in plan_parameter(layout, None).slices:
            writer = None if layout.is_copy else owner(slice_.component.name_of(layout.key), len(ranks))
            _add(counts, 0, writer, self._work_of(slice_, buffer))
        self._tally.add(_part(layout.key), ranks, counts)

    def _ranks(self, expert: bool, along: Iterable[str]) -> Ranks:
        return self._subject.layout.replica_groups(tuple(dict.fromkeys(along)), expert=expert, stage=self._stage)

    def _along(self, parameter: ModelParameter, context: ParameterContext) -> tuple[str, ...]:
        """The dimensions along which ranks hold the same of a parameter."""
        is_cut, is_whole = parameter.layout.tensor_parallel_dim is not None, item_of(parameter, self._subject) is None
        along = replicated_along(self._model.get_distributed_index(), context, is_cut=is_cut, is_whole=is_whole)
        return tuple(name for name in along if name != "expert" or self._subject.layout.expert > 1)

    def _slices(self, parameter: ModelParameter) -> list[tuple[int, Sequence[Slice]]]:
        """What data-parallel ranks have of it: planned once for parameters that are cut alike."""
        layout, item, claim = parameter.layout, item_of(parameter, self._subject), claim_of(parameter)
        cut = layout.local_shape, layout.tensor_parallel, layout.tensor_parallel_dim, layout.replica
        alike = *cut, claim, item and item.place
        if alike not in self._planned:
            self._planned[alike] = [
                (rank, plan_parameter(replace(layout, flat=flat), claim).slices)
                for rank, flat in parts_of(parameter, self._subject)
            ]
        return self._planned[alike]

    def _work_of(self, slice_: Slice, parameter: ModelParameter) -> Counts:
        """What it is to write and to hold it, with the optimizer's state of it."""
        tensor = parameter.tensor
        alike = slice_.box.size, slice_.is_origin, tensor.dtype, tensor.requires_grad
        if alike not in self._works:
            slots = self._subject.slots.values() if tensor.requires_grad else ()
            dtypes = (tensor.dtype, *(slot.dtype for slot in slots if slot.kind == "sharded"))
            lengths, tensors = record_lengths(slice_.box.size, *dtypes), len(dtypes)
            numbers = 1 + len(slots) - tensors
            declared = (numbers, numbers + tensors) if slice_.is_origin else (0, 0)
            work = Work(sum(lengths), len(lengths), tensors, *declared, sum(lengths), tensors)
            self._works[alike] = np.array(astuple(work), dtype=np.int64)
        return self._works[alike]


def _no_work(ranks: Ranks) -> Counts:
    """By place in the replica group, data-parallel rank and metric."""
    return np.zeros((*ranks.shape[:2], len(METRICS)), dtype=np.int64)


def _add(counts: Counts, rank: int, writer: int | None, work: Counts) -> None:
    """All of a replica group hold a slice; one of them writes it, or nobody."""
    counts[:, rank, _HELD:] += work[_HELD:]
    if writer is not None:
        counts[writer, rank, :_HELD] += work[:_HELD]


def _part(key: str) -> str:
    return next((part for word, part in _PARTS.items() if word in key), OTHERS)
