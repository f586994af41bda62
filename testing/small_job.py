# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A job in small, on CPU ranks: saved, loaded, loaded in another layout, compared with what was estimated.

python -m testing.small_job MODEL --layout world=64,tp=2 --ranks 4
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.format.names import payload_name
from mbridge_fsdp_ckpt.io.progress import Unwatched
from mbridge_fsdp_ckpt.io.store import as_path
from mbridge_fsdp_ckpt.live.local_shards import model_shards, optimizer_parts, optimizer_shards
from mbridge_fsdp_ckpt.live.optimizer.adapters import grouped
from mbridge_fsdp_ckpt.live.optimizer.base import STEP
from mbridge_fsdp_ckpt.live.planned import plan_model
from mbridge_fsdp_ckpt.live.readers.megatron_fsdp import find_fsdp_module
from mbridge_fsdp_ckpt.live.tensors import local_shard
from mbridge_fsdp_ckpt.tools.compare import Tolerance
from mbridge_fsdp_ckpt.tools.convert.hugging_face import Sizes, arrange
from mbridge_fsdp_ckpt.tools.diff import differences
from mbridge_fsdp_ckpt.tools.estimate.estimate import estimate
from mbridge_fsdp_ckpt.tools.estimate.job import Described, describe, sizes_of
from mbridge_fsdp_ckpt.tools.estimate.layout import JobLayout
from recipes.tiny import shrink_model
from testing.kernels import let_mamba_be_built
from testing.models import adam
from testing.modules import BRIDGE_MODULES, installed
from testing.ranks import RankPool, no_process_group

VOCABULARY_MULTIPLE = 8  # the same vocabulary in every layout
STEPS = 3.0
Asked = dict[str, Any]
"""`model`, `ranks`, and what `describe` takes: `layout` and `kept`."""


def in_small(layout: JobLayout, world: int) -> JobLayout:
    """A layout of a few ranks in the shape of another: parallelism that it has is of size two, as far as ranks go."""
    small = JobLayout(world, outer=layout.outer, strategy=layout.strategy)
    for name in ("tensor", "expert", "instances", "expert_tensor", "context"):
        if getattr(layout, name) > 1:
            small = _changed(small, **{name: 2}) or small
    return small


def other_than(layout: JobLayout) -> JobLayout:
    """A layout that cuts tensors otherwise: by tensor parallelism, or without it; else on half the ranks."""
    toggled = _changed(layout, tensor=1 if layout.tensor > 1 else 2)
    return toggled or _changed(layout, world=layout.world // 2) or JobLayout(layout.world)


def _changed(layout: JobLayout, **sizes: Any) -> JobLayout | None:
    """Another layout; None where the sizes do not fit."""
    try:
        return replace(layout, **sizes)
    except ConfigurationError:
        return None


def _described(asked: Asked, layout: JobLayout | None = None) -> Described:
    """The small job, in its own layout or in another."""
    let_mamba_be_built()
    found = describe(asked["model"], asked["layout"], asked["kept"])
    shrink_model(found.provider)
    found.provider.make_vocab_size_divisible_by = VOCABULARY_MULTIPLE
    return Described(found.name, found.provider, layout or in_small(found.layout, asked["ranks"]), found.kept)


def _build(asked: Asked, layout: JobLayout, seed: int) -> tuple[Any, Any]:
    """The small model under Megatron-FSDP, and its optimizer, without state."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig

    described = _described(asked, layout)
    provider, kept = described.provider, described.kept
    arrange(provider, torch.bfloat16, Sizes(layout.tensor, layout.context, layout.expert, layout.expert_tensor))
    provider.pipeline_model_parallel_size = 1
    provider.finalize()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    provider.initialize_model_parallel(seed=seed, num_distributed_optimizer_instances=layout.instances)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=layout.strategy,
        num_distributed_optimizer_instances=layout.instances,
        outer_dp_sharding_strategy=layout.outer,
        megatron_fsdp_main_params_dtype=kept.main,
    )
    (model,) = provider.provide_distributed_model(ddp_config=ddp, use_megatron_fsdp=True)
    return model, None if kept.optimizer == "none" else adam(model, torch_only=kept.is_torch)


def _fill(optimizer: Any, asked: Asked) -> None:
    """Give the optimizer a state that follows the weights: the same on all ranks that hold a copy."""
    specs = _described(asked).kept.slots()
    for adapter, groups in grouped(optimizer):
        for group in groups:
            for parameter in group.parameters:
                weight = local_shard(parameter).reshape(-1)
                slots = adapter.allocate(parameter, specs)
                for number, slot in enumerate((slot for name, slot in slots.items() if name != STEP), 1):
                    slot.tensor.copy_(weight.abs() * number)
                if weight.numel():
                    adapter.install(parameter, slots, STEPS)


def _held(model: Any, optimizer: Any) -> dict[tuple[str, Any], torch.Tensor]:
    planned = plan_model(find_fsdp_module(model))
    shards = list(model_shards(planned))
    if optimizer is not None:
        shards += optimizer_shards(optimizer_parts(grouped(optimizer), planned))[0]
    return {(item.key, item.box): item.elements().clone() for item in shards}


def saved_and_loaded(asked: Asked, directory: str) -> dict[str, Any]:
    """Save, load into a model initialised otherwise, compare all that this rank holds."""
    layout = _described(asked).layout
    model, optimizer = _build(asked, layout, seed=1)
    if optimizer is not None:
        _fill(optimizer, asked)
    start = time.perf_counter()
    mbridge_fsdp_ckpt.save(directory, model=model, optimizer=optimizer, values={"iteration": 1})
    saving = time.perf_counter() - start
    wanted = _held(model, optimizer)
    model, optimizer = _build(asked, layout, seed=2)
    start = time.perf_counter()
    mbridge_fsdp_ckpt.load(directory, model=model, optimizer=optimizer)
    loading = time.perf_counter() - start
    found = _held(model, optimizer)
    same = found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    return {"save": saving, "load": loading, "same": same, "blocks": len(wanted)}


def resharded(asked: Asked, other: JobLayout, directory: str, again: str) -> float:
    """Load in another layout, and save again."""
    model, optimizer = _build(asked, other, seed=3)
    start = time.perf_counter()
    loaded = mbridge_fsdp_ckpt.load(directory, model=model, optimizer=optimizer)
    seconds = time.perf_counter() - start
    mbridge_fsdp_ckpt.save(again, model=model, optimizer=optimizer, values=dict(loaded.values))
    return seconds


@no_process_group
def predicted(asked: Asked) -> dict[int, int]:
    """Bytes of each rank, estimated."""
    tally = estimate(_described(asked).job()).tally
    return {rank: tally.work(rank).bytes for rank in range(tally.world)}


@no_process_group
def laid_out(asked: Asked) -> tuple[JobLayout, JobLayout]:
    """The small job's layout, and the other one."""
    layout = _described(asked).layout
    return layout, other_than(layout)


def run_small(pool: RankPool, asked: Asked, folder: Path) -> dict[str, Any]:
    """Run the small job on the ranks of a pool, and say what came of it."""
    place, again = str(folder / "saved"), str(folder / "again")
    layout, other = pool.run(laid_out, asked, ranks=1)[0]
    own = pool.run(saved_and_loaded, asked, place, ranks=layout.world)
    seconds = pool.run(resharded, asked, other, place, again, ranks=other.world)
    estimated = pool.run(predicted, asked, ranks=1)[0]
    differing = differences(as_path(place), as_path(again), Tolerance(0.0, 0.0), progress=Unwatched())
    sizes = {rank: _size(Path(place) / payload_name(rank)) for rank in range(layout.world)}
    return {
        "layout": asdict(layout),
        "other_layout": asdict(other),
        "bytes": sum(sizes.values()),
        "blocks": sum(rank["blocks"] for rank in own),
        "as_estimated": sizes == estimated,
        "load_is_identical": all(rank["same"] for rank in own),
        "resharded_load_is_identical": differing.equal and differing.compared > 0,
        "seconds": {"save": own[0]["save"], "load": own[0]["load"], "resharded_load": max(seconds)},
    }


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def main() -> None:
    """Run one and print what came of it."""
    parser = argparse.ArgumentParser(description="Save, load and reshard a job in small, on CPU ranks.")
    parser.add_argument("model", help="as `mbridge_fsdp_ckpt estimate` takes it")
    parser.add_argument("--layout", required=True, metavar="SIZES", help="world=64,tp=2")
    parser.add_argument("--optimizer", default="fused", choices=("fused", "torch", "none"))
    parser.add_argument("--ranks", type=int, default=2, choices=range(2, 9), metavar="2..8")
    args = parser.parse_args()
    kept = {"optimizer": args.optimizer}
    asked = {"model": args.model, "ranks": args.ranks, "layout": sizes_of(args.layout), "kept": kept}
    with (
        tempfile.TemporaryDirectory() as folder,
        RankPool(args.ranks, time_limit=600.0, preload=installed(BRIDGE_MODULES)) as pool,
    ):
        found = run_small(pool, asked, Path(folder))
    print(json.dumps(found, indent=1))
    sys.exit(not all(found[name] for name in ("as_estimated", "load_is_identical", "resharded_load_is_identical")))


if __name__ == "__main__":
    main()
