# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Runs of the launcher on CPU ranks, as cases for ranks that live on."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from recipes.__main__ import main
from testing.bridge import losses_by_step
from testing.ranks import no_process_group
from tests.patched import patched
from tests.recipes.kernels import torch_kernels

CPU = (
    "dist.distributed_backend=gloo",
    "ddp.average_in_collective=false",
    "ddp.gradient_reduce_div_fusion=false",
    "model.gradient_accumulation_fusion=false",
    "model.apply_rope_fusion=false",
    "model.moe_permute_fusion=false",
)
"""What neither gloo nor a CPU can do."""

_WAIT_FOR_DEATH_S = 60.0


@dataclass(frozen=True)
class Death:
    """Where a rank is killed: before the `time`th call of a function."""

    call: str
    time: int
    rank: int


@dataclass(frozen=True)
class Run:
    """One start of a recipe.

    Args:
        recipe: Its name.
        directory: Checkpoints, to load from and to save to.
        iterations: Last iteration; every one is saved.
        arguments: More of the command line.
        death: Who is killed, and where; the others then wait to be.
        format: Of the checkpoints that it saves.
    """

    recipe: str
    directory: str
    iterations: int = 3
    arguments: tuple[str, ...] = ()
    death: Death | None = None
    format: str = "fsdp_dtensor_safe"

    def on(self, **changes: Any) -> Run:
        """The same run, changed."""
        return replace(self, **changes)

    @property
    def command_line(self) -> list[str]:
        """What a user would write after `python -m recipes`."""
        return [
            self.recipe,
            *CPU,
            f"checkpoint.format={self.format}",
            f"checkpoint.save={self.directory}",
            f"checkpoint.load={self.directory}",
            "checkpoint.save_interval=1",
            f"train.train_iters={self.iterations}",
            *self.arguments,
        ]


@no_process_group
def train(run: Run) -> dict[int, float]:
    """Start a recipe; its losses as full floats, by iteration."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    with torch_kernels(), losses_by_step() as losses, _mortal(run.death):
        try:
            assert main(run.command_line) == 0
        except Exception:
            if run.death is None:
                raise
        if run.death is not None:
            time.sleep(_WAIT_FOR_DEATH_S)  # the test kills everybody once the first one is dead
    return losses


@contextlib.contextmanager
def _mortal(death: Death | None) -> Iterator[None]:
    if death is None or death.rank != int(os.environ["RANK"]):
        yield
        return
    calls = itertools.count(1)

    def killing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == death.time:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    with patched(death.call, killing):
        yield
