# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""An estimate: all ranks counted, some planned as a save plans them, both compared; and what a load of it reads.

A load verifies, and so reads, every hashed block of a record that it uses a part of (`plan.records`).  A block that is
cut between two writers (`plan.shares`) counts as if one had written it: of each replica group that holds the same, that
is one less than it has ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from mbridge_fsdp_ckpt.errors import InternalError
from mbridge_fsdp_ckpt.format.payload import record_length
from mbridge_fsdp_ckpt.format.sums import sums_bytes
from mbridge_fsdp_ckpt.live.readers.megatron_fsdp import model_parameters
from mbridge_fsdp_ckpt.live.readers.protocol import ModelParameter
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name
from mbridge_fsdp_ckpt.plan.layout import Axis
from mbridge_fsdp_ckpt.plan.records import part_of, records_of
from mbridge_fsdp_ckpt.plan.slices import Component, plan_parameter
from mbridge_fsdp_ckpt.tools.balance import Balance, RankShare, balance
from mbridge_fsdp_ckpt.tools.estimate.counted import (
    RankPlan,
    Tally,
    claim_of,
    count_stage,
    lengths_of,
    parts_of,
    plan_rank,
)
from mbridge_fsdp_ckpt.tools.estimate.job import JobToEstimate
from mbridge_fsdp_ckpt.tools.estimate.layout import JobLayout
from mbridge_fsdp_ckpt.tools.estimate.model import EstimatedModel, Subject, as_expert_rank, as_rank


@dataclass(frozen=True, slots=True)
class Estimate:
    """What was found.

    Args:
        name: What the job was made from.
        layout: Its layout.
        tally: What each rank has to do.
        subjects: Its model, by pipeline stage.
        plans: Of those ranks that were planned as a save plans them.
        seconds: What the estimate took.
    """

    name: str
    layout: JobLayout
    tally: Tally
    subjects: tuple[Subject, ...]
    plans: dict[int, RankPlan]
    seconds: float

    @property
    def balance(self) -> Balance:
        """How evenly the ranks share the bytes."""
        pairs = enumerate(zip(self.tally.bytes.tolist(), self.tally.chunks.tolist(), strict=True))
        return balance({rank: RankShare(size, chunks) for rank, (size, chunks) in pairs})

    @property
    def planning(self) -> tuple[float, float]:
        """Seconds that planning took the slowest of these: for the first save, and for a later one."""
        seconds = [plan.seconds for plan in self.plans.values()]
        return max(first for first, _ in seconds), max(later for _, later in seconds)


def estimate(job: JobToEstimate) -> Estimate:
    """Count what each rank of a job would write.

    Raises:
        ConfigurationError: The model cannot be built in that layout.
        LayoutError, FamilyError: As a save does.
        InternalError: What is counted is not what a save plans.
    """
    start = time.perf_counter()
    layout, tally = job.layout, Tally(job.layout.world)
    subjects: list[Subject] = []
    plans: dict[int, RankPlan] = {}
    for stage in range(layout.pipeline):
        first = stage * layout.stage_world
        with as_rank(layout, first):
            subjects.append(job.subject())
            count_stage(subjects[stage], stage, tally)
            plans[first] = _planned(subjects[stage], first, tally)
    last = layout.world - 1
    for rank in sorted({last, last - layout.stage_world // 2} - plans.keys()):
        with as_rank(layout, rank):
            plans[rank] = _planned(subjects[rank // layout.stage_world], rank, tally)
    return Estimate(job.name, layout, tally, tuple(subjects), plans, time.perf_counter() - start)


def _planned(subject: Subject, rank: int, tally: Tally) -> RankPlan:
    plan = plan_rank(subject)
    if plan.work != tally.work(rank):
        raise InternalError(
            expected=f"{plan.work}, as a save plans it",
            found=f"{tally.work(rank)}, counted for all ranks",
            remedy="Report it with the configuration and the layout.",
            rank=rank,
        )
    return plan


def read_over_held(saved: Estimate, loading: Estimate) -> float:
    """Bytes of records that the planned ranks of a loading job read, over those of what they hold.

    Args:
        saved: The job that saved.
        loading: A job of the same model in another layout.
    """
    shards = [item for plan in loading.plans.values() for item in plan.shards if not item.is_scalar]
    found = _parameters(saved, {item.plan.layout.key for item in shards})
    written = {key: _written(parameter, subject) for key, parameter, subject in found}
    met: dict[_Place, int] = {}
    read = 0
    for item in shards:
        place = item.plan.layout.key, item.slice_.component, item.box, dtype_from_name(item.entry.dtype)
        if place not in met:
            met[place] = _read_bytes(*place[2:], written[place[0]].get(place[1], ()))
        read += met[place]
    return read / sum(sum(lengths_of(item)) for item in shards)


type _Place = tuple[str, Component, Box, torch.dtype]


def _parameters(saved: Estimate, wanted: set[str]) -> Iterator[tuple[str, ModelParameter, Subject]]:
    """The parameters of these names on disk, as ranks with coordinates of zero hold them."""
    layout, left = saved.layout, set(wanted)
    for stage, subject in enumerate(saved.subjects):
        with as_rank(layout, stage * layout.stage_world):
            model = EstimatedModel(subject)
            for expert in range(layout.expert):
                with as_expert_rank(expert):
                    found = {parameter.layout.key: parameter for parameter in model_parameters(model)}
                yield from ((key, found[key], subject) for key in left & found.keys())
                left -= found.keys()
                if not left:
                    return


def _written(parameter: ModelParameter, subject: Subject) -> dict[Component, set[Box]]:
    """The blocks that all ranks have of a parameter."""
    layout, claim = parameter.layout, claim_of(parameter)
    ranks = layout.tensor_parallel.count
    found: dict[Component, set[Box]] = {}
    for _, flat in parts_of(parameter, subject):
        for rank in range(ranks if layout.tensor_parallel_dim is not None else 1):
            for slice_ in plan_parameter(replace(layout, flat=flat, tensor_parallel=Axis(rank, ranks)), claim).slices:
                found.setdefault(slice_.component, set()).add(slice_.box)
    return found


def _read_bytes(wanted: Box, dtype: torch.dtype, written: Iterable[Box]) -> int:
    """What is read of the records of a tensor for a block of it."""
    boxes = (box for box in written if box.intersect(wanted) is not None)
    records = (record for box in boxes for record in records_of(box, dtype.itemsize))
    return sum(_bytes_of(record, dtype, wanted) for record in records if record.intersect(wanted) is not None)


def _bytes_of(record: Box, dtype: torch.dtype, wanted: Box) -> int:
    part = part_of(record, dtype.itemsize, [wanted])
    if part is None:
        return record_length(dtype, record.size)
    return part.end - part.begin + sums_bytes(record.volume * dtype.itemsize)
