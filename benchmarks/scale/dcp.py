# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What the coordinator of torch's Distributed Checkpoint does of a save, for the chunks of a synthetic checkpoint."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from benchmarks.scale.synthetic import ROWS, SLOTS, WIDTH, Synthetic


@dataclass(frozen=True, slots=True)
class Planned:
    """Plain DCP's global plan, validation included, of all ranks' local plans.

    Args:
        ranks: That save.
        chunks: Of each rank.
        cpu: Seconds of the coordinator.
    """

    ranks: int
    chunks: int
    cpu: float


def measure(ranks: int, chunks: int) -> Planned:
    """Local plans are made first, and are not measured: each rank makes its own."""
    synthetic = Synthetic.of(ranks, chunks)
    plans = [
        SavePlan(
            [
                _item(synthetic.key(parameter, slot), box.offset, box.size)
                for parameter, box in synthetic.own(rank).items()
                for slot in SLOTS
            ]
        )
        for rank in range(ranks)
    ]
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner({}, is_coordinator=True)
    begin = time.process_time()
    planner.create_global_plan(plans)
    return Planned(ranks, chunks, time.process_time() - begin)


def _item(key: str, offset: tuple[int, ...], size: tuple[int, ...]) -> WriteItem:
    place, extent = torch.Size(offset), torch.Size(size)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(place, extent),
        properties=TensorProperties(dtype=torch.float32),
        size=torch.Size((ROWS, WIDTH)),
    )
    return WriteItem(index=MetadataIndex(key, place), type=WriteItemType.SHARD, tensor_data=data)
