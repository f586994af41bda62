# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""One rank, planned by the very functions that a save calls."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

from mbridge_fsdp_ckpt.live.local_shards import LocalShard
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name
from mbridge_fsdp_ckpt.saving.snapshot import observe, plan_save
from mbridge_fsdp_ckpt.tools.estimate.model import EstimatedModel, Subject, optimizer_over
from mbridge_fsdp_ckpt.tools.estimate.records import Records, records_in


@dataclass(frozen=True, slots=True)
class RankWork:
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

    bytes: int
    chunks: int
    blocks: int
    numbers: int
    keys: int
    held_bytes: int
    held_blocks: int


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
    def work(self) -> RankWork:
        """The local shards, counted."""
        own = [item for item in self.shards if item.slice_.writes]
        blocks = [item for item in own if not item.is_scalar]
        held = [item for item in self.shards if not item.is_scalar]
        records = [_records(item) for item in blocks]
        return RankWork(
            bytes=sum(some.bytes for some in records),
            chunks=sum(some.chunks for some in records),
            blocks=len(blocks),
            numbers=len(own) - len(blocks),
            keys=len({item.key for item in own if item.slice_.is_origin}),
            held_bytes=sum(_records(item).bytes for item in held),
            held_blocks=len(held),
        )


def plan_rank(subject: Subject, rank: int) -> RankPlan:
    """Plan a rank's part of a save; this process passes for that rank (`world.as_rank`).

    Raises:
        LayoutError, FamilyError: As a save does.
    """
    model = EstimatedModel(subject, rank)
    optimizer = optimizer_over(subject, model)
    seconds = []
    shards: list[LocalShard] = []
    gc.collect()  # what building the model has left behind is none of planning's cost
    for _ in range(2):  # the plan is kept for the next save
        start = time.process_time()
        shards = plan_save(observe(model, optimizer, None, None, None, subject.vocabulary_size)).shards
        seconds.append(time.process_time() - start)
    return RankPlan(shards, (seconds[0], seconds[1]))


def _records(shard: LocalShard) -> Records:
    return records_in(shard.box.size, dtype_from_name(shard.entry.dtype))
