# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""An estimate of the core tests' models, and what a real save of them wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from mbridge_fsdp_ckpt.format.columns import box_of
from mbridge_fsdp_ckpt.format.names import payload_name
from mbridge_fsdp_ckpt.format.reader import SafeSource
from mbridge_fsdp_ckpt.integrations.bridge.without_gpu import without_memory
from mbridge_fsdp_ckpt.io.store import as_path
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.tools.estimate import estimate as tool
from mbridge_fsdp_ckpt.tools.estimate.costs import files_of, index_of
from mbridge_fsdp_ckpt.tools.estimate.counted import Work, lengths_of, plan_rank
from mbridge_fsdp_ckpt.tools.estimate.job import JobToEstimate, Kept, Optimizer
from mbridge_fsdp_ckpt.tools.estimate.layout import JobLayout, Outer, Strategy
from mbridge_fsdp_ckpt.tools.estimate.model import Subject, as_rank
from testing.kernels import replace_cuda_only_kernels
from testing.models import Recipe, gpt
from testing.ranks import no_process_group
from tests.core import cases

Rows = list[tuple[str, tuple[int, ...], tuple[int, ...]]]
"""What a rank writes: key, offset, size."""


def _job(recipe: Recipe, ranks: int) -> JobToEstimate:
    layout = JobLayout(
        ranks,
        tensor=recipe.tensor,
        expert=recipe.expert,
        instances=recipe.instances,
        outer=cast(Outer, recipe.outer),
        strategy=cast(Strategy, recipe.strategy),
    )
    moments = (recipe.optimizer_settings.get("exp_avg_dtype", torch.float32),) * 2
    optimizer: Optimizer = "fused" if recipe.optimizer == "auto" else "torch"
    kept = Kept(optimizer, torch.float32, moments, recipe.offload or 0.0)
    slots = kept.slots()

    def subject() -> Subject:
        replace_cuda_only_kernels()
        with without_memory():
            module = gpt(recipe)
        return Subject(module, layout, kept.main, slots)

    return JobToEstimate("a model of the core tests", layout, subject)


@no_process_group
def with_small_records(largest: int, case: Callable[..., Any], *arguments: Any) -> Any:
    """See `cases.with_small_records`."""
    return cases.with_small_records(largest, case, *arguments)


@no_process_group
def estimate(recipe: Recipe, ranks: int) -> dict[str, Any]:
    """What the two ways of an estimate say: every rank's rows and work as planned, and work as counted."""
    found = tool.estimate(_job(recipe, ranks))
    planned = {}
    for rank in range(ranks):
        with as_rank(found.layout, rank):
            planned[rank] = plan_rank(found.subjects[0])
    return {
        "rows": {rank: _rows(plan) for rank, plan in planned.items()},
        "keys": {rank: _keys(plan) for rank, plan in planned.items()},
        "planned": {rank: plan.work for rank, plan in planned.items()},
        "counted": {rank: found.tally.work(rank) for rank in range(ranks)},
        "files": files_of(found.tally),
        "index": index_of(found).total,
    }


@no_process_group
def elsewhere(saved: Recipe, ranks: int, loading: Recipe, other_ranks: int) -> tuple[float, list[tuple[str, Box, int]]]:
    """What a load in another layout reads over what it holds, and all it holds: key, block, bytes of a record."""
    jobs = [tool.estimate(_job(saved, ranks)), tool.estimate(_job(loading, other_ranks))]
    held = [
        (item.key, item.box, sum(lengths_of(item)))
        for plan in jobs[1].plans.values()
        for item in plan.shards
        if not item.is_scalar
    ]
    return tool.read_over_held(*jobs), held


def really_read(directory: Path, held: list[tuple[str, Box, int]]) -> float:
    """The same ratio, by what a load reads of the records that were written."""
    source = SafeSource(as_path(directory))
    read = 0
    for key, box, _ in held:
        met = [chunk for chunk in source.chunks([key], {key: [box]})[key] if chunk.box.intersect(box) is not None]
        assert met, f"nothing of {key} {box} was written"
        read += sum(chunk.record.length + chunk.sums.length for chunk in met)
    return read / sum(size for _, _, size in held)


def _rows(plan: Any) -> Rows:
    own = [item for item in plan.shards if item.slice_.writes]
    return sorted((item.key, item.box.offset, item.box.size) for item in own)


def _keys(plan: Any) -> list[str]:
    return sorted({item.key for item in plan.shards if item.slice_.writes and item.slice_.is_origin})


def written(directory: Path) -> dict[str, Any]:
    """The same of a checkpoint, and the sizes of its payload files."""
    source = SafeSource(as_path(directory))
    found: dict[str, Any] = {"rows": {}, "keys": {}, "payload": {}, "counted": {}}
    for rank, index in source.own_indexes():
        columns = index.columns()
        keys = [index.text_of_key(place) for place in range(len(columns.keys))]
        chunks = [
            (keys[place], box.offset, box.size)
            for place, rows in index.sharded_rows()
            for box in (box_of(row, len(index.entry(place).shape)) for row in rows)
        ]
        counted = zip(keys, columns.keys["origins"].tolist(), strict=True)
        declared = sorted(key for key, origins in counted if origins)
        numbers = [key for key in declared if not source.metadata.keys[key].is_sharded]
        found["rows"][rank] = sorted([*chunks, *((key, (), ()) for key in numbers)])
        found["keys"][rank] = declared
        payload = directory / payload_name(rank)
        found["payload"][rank] = payload.stat().st_size if payload.exists() else 0
        found["counted"][rank] = (len(chunks), len(numbers), len(declared))
    return found


def counts(work: Work[int]) -> tuple[int, int, int]:
    """Chunks, numbers and keys."""
    return work.chunks, work.numbers, work.keys
