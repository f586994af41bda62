"""What each rank does in the tests that need GPUs: `torchrun tests/gpu/cases.py CASE DIRECTORY RESULTS [--cpu]`.

With `--cpu` the same code runs on CPU ranks over gloo, so that a machine without a GPU can tell whether it runs at all.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.hosts import corrections
from mbridge_fsdp_ckpt.testing.models import Recipe, Trainable, build, build_fp8
from tests.core import oracle

ALONE = Recipe(layers=2, hidden=64, ffn=128, optimizer="auto")
OFFLOADED = ALONE.on(
    offload=1.0,
    optimizer_settings={"overlap_cpu_optimizer_d2h_h2d": True, "use_precision_aware_optimizer": True},
    ddp={"megatron_fsdp_use_decoupled_grad": True},
)


def training(directory: str) -> dict[str, Any]:
    """Transformer Engine's FusedAdam on the device."""
    return _resumed(build, ALONE, directory)


def offloaded(directory: str) -> dict[str, Any]:
    """The configuration of Megatron-LM issue 4910."""
    corrections.apply(__name__)
    result = _resumed(build, OFFLOADED, directory)
    inner = result.pop("trainable").optimizer
    copies = [
        copy
        for part in getattr(inner, "chained_optimizers", [inner])
        for copy in part.optimizer.cpu_copys_map_gpu_param
        if copy.numel()
    ]
    return {**result, "pinned": [bool(copy.is_pinned()) for copy in copies]}


def fp8(directory: str) -> dict[str, Any]:
    """Delayed scaling: amax histories and scales live in `_extra_state`."""
    result = _resumed(build_fp8, ALONE, directory)
    return {**result, "scaling": [_scaling(result["before"]), _scaling(result["trainable"])]}


def _resumed(make: Callable[..., Trainable], recipe: Recipe, directory: str) -> dict[str, Any]:
    """Two steps, a save, two more; then a model initialised otherwise loads and takes the same two."""
    first = make(recipe)
    for number in range(2):
        first.step(number)
    mbridge_fsdp_ckpt.save(directory, model=first.model, optimizer=first.optimizer)
    again = make(recipe, seed=999)
    mbridge_fsdp_ckpt.load(directory, model=again.model, optimizer=again.optimizer)
    live = [oracle.live(first), oracle.live(again)]
    losses = [[trainable.step(number) for number in (2, 3)] for trainable in (first, again)]
    end = [oracle.live(first), oracle.live(again)]
    return {"losses": losses, "live": live, "end": end, "before": first, "trainable": again}


def _scaling(trainable: Trainable) -> dict[str, str]:
    """Each module's FP8 state, as text."""
    found = {}
    for name, module in trainable.model.named_modules():
        for direction, meta in getattr(module, "fp8_meta", {}).items():
            for part in ("scale", "amax_history"):
                value = getattr(meta, part, None)
                if value is not None:
                    found[f"{name}.{direction}.{part}"] = str(value.tolist())
    return found


CASES = {case.__name__: case for case in (training, offloaded, fp8)}


def main() -> None:
    """Run one case; rank 0 writes what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("directory")
    parser.add_argument("results", type=Path)
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import transformer_engine.pytorch  # noqa: F401 - looks for CUDA while imported

    if given.cpu:
        from mbridge_fsdp_ckpt.testing import cpu_cuda
        from mbridge_fsdp_ckpt.testing.kernels import replace_cuda_only_kernels

        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
        cpu_cuda.install()
        replace_cuda_only_kernels()
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", timeout=timedelta(seconds=300))
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = CASES[given.case](given.directory)
    if dist.get_rank() == 0:
        plain = {name: value for name, value in found.items() if not isinstance(value, Trainable)}
        given.results.write_text(json.dumps(plain))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
