# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Training that was saved and resumed goes on bit for bit, with every optimizer that the machine can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mbridge_fsdp_ckpt
from testing.gpu.job import Job
from testing.gpu.state import digests, host_copies, scaling
from testing.models import Recipe, Trainable, build, build_fp8
from testing.modules import is_installed

SMALL = Recipe(layers=2, hidden=64, ffn=128)
OVERLAPPED = SMALL.on(offload=1.0, optimizer_settings={"overlap_cpu_optimizer_d2h_h2d": True})
ISSUE_4910 = SMALL.on(
    optimizer="auto",
    offload=1.0,
    optimizer_settings={"overlap_cpu_optimizer_d2h_h2d": True, "use_precision_aware_optimizer": True},
    ddp={"megatron_fsdp_use_decoupled_grad": True},
)
FP8_CAPABILITY = (8, 9)
STEPS = 3


@dataclass(frozen=True, slots=True)
class Case:
    """A model and an optimizer.

    Args:
        recipe: Both.
        make: What builds them.
        engine: Whether they need Transformer Engine.
    """

    recipe: Recipe
    make: Callable[..., Trainable] = build
    engine: bool = False

    def refusal(self, *, cpu: bool) -> str | None:
        """Why it cannot run here."""
        if self.engine and not is_installed("transformer_engine"):
            return "needs Transformer Engine, which is not installed"
        if self.make is build_fp8 and cpu:
            return "needs a GPU"
        if self.make is build_fp8 and torch.cuda.get_device_capability() < FP8_CAPABILITY:
            return f"needs a GPU of compute capability 8.9, not {torch.cuda.get_device_capability()}"
        return None


CASES = {
    "torch AdamW": Case(SMALL),
    "offload 1.0, overlap": Case(OVERLAPPED),
    "offload 0.5": Case(SMALL.on(offload=0.5)),
    "FusedAdam": Case(SMALL.on(optimizer="auto"), engine=True),
    "issue 4910": Case(ISSUE_4910, engine=True),
    "FP8, delayed scaling": Case(SMALL.on(optimizer="auto"), build_fp8, engine=True),
}


def resume(job: Job) -> dict[str, Any]:
    """Run every case that can run here."""
    found = {}
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name, case in CASES.items():
        if not job.refused(name, case.refusal(cpu=job.options.cpu)):
            found[name] = job.attempt(name, partial(_resumed, job, name, case))
    torch.use_deterministic_algorithms(False)  # it fills memory that others time
    return found


def _resumed(job: Job, name: str, case: Case) -> dict[str, Any]:
    """Steps, a save, the same number more; then a model initialised otherwise loads and takes the latter."""
    directory = Path(job.options.disk) / f"iter_{list(CASES).index(name):07d}"
    first = case.make(case.recipe)
    for number in range(STEPS):
        first.step(number)
    saved = digests(first)
    mbridge_fsdp_ckpt.save(directory, model=first.model, optimizer=first.optimizer)
    losses = [first.step(number) for number in range(STEPS, 2 * STEPS)]
    end = digests(first)
    again = case.make(case.recipe, seed=999)
    before = digests(again)
    mbridge_fsdp_ckpt.load(directory, model=again.model, optimizer=again.optimizer)
    loaded = digests(again)
    resumed_losses = [again.step(number) for number in range(STEPS, 2 * STEPS)]
    job.expect(f"{name}: the model that loads differs before", before != saved)
    job.expect(f"{name}: what was loaded is what was saved", loaded == saved)
    job.expect(f"{name}: training changes what was saved", end != saved)
    job.expect(f"{name}: the resumed run has the losses of the one that went on", resumed_losses == losses)
    job.expect(f"{name}: the resumed run ends as the one that went on", digests(again) == end)
    copies = host_copies(again)
    job.expect(f"{name}: there are host copies where the optimizer is offloaded", _agrees(copies, case.recipe.offload))
    if not job.options.cpu:  # the stand-in for CUDA pins nothing
        job.expect(f"{name}: host copies are in pinned memory", all(copy.is_pinned() for copy in copies))
    job.expect(f"{name}: there is scaling state where there is FP8", bool(scaling(again)) == (case.make is build_fp8))
    return {
        "losses": losses,
        "tensors": len(saved),
        "host_copies": len(copies),
        "pinned": sum(copy.is_pinned() for copy in copies),
    }


def _agrees(copies: list[torch.Tensor], offload: float | None) -> bool:
    """Whether there are host copies just where there should be; a rank other than 0 may have no offloaded element."""
    if offload is None:
        return not copies
    return bool(copies) or dist.get_rank() > 0
