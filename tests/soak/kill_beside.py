# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Deaths in the middle of an asynchronous save: of the writer, of its trainer, or of both.

A writer is told of its death as it starts (`in_writer`).
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import Any, Literal

import torch.distributed as dist

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.errors import CheckpointError
from tests.core import cases
from tests.patched import patched
from tests.soak import in_writer
from tests.soak.kill import EVERYBODY, NEW, RECIPE, STEPS, Step, call_of, save, signed

Who = Literal["writer", "trainer", "both"]
WHO: tuple[Who, ...] = ("writer", "trainer", "both")

_OF_TRAINERS = {"saving.snapshot:plan_save"}
WRITERS_STEPS = tuple(step for step in STEPS if step.name not in _OF_TRAINERS and step.exchanges)
"""What a writer does of the steps of a save."""

OWN_STEPS = (
    Step("saving.background.checkpoint_main:Writer._begin", EVERYBODY),
    Step("saving.background.arriving:Arriving._pieces", EVERYBODY, times=3),
    Step("saving.background.checkpoint_main:Writer._ask"),
    Step("saving.background.channel:Channel.send", EVERYBODY),
)
"""And what it does besides."""


def save_and_die(root: str, number: int, heartbeats: str, who: Who, step: str, time: int, rank: int) -> str:
    """Save the newer state asynchronously as iteration `number`; somebody dies meanwhile.  What a survivor saw."""
    trainable = cases.prepared(RECIPE, steps=NEW)
    settings = mbridge_fsdp_ckpt.Settings(time_limit=5.0)
    dist.barrier()
    with signed(Path(heartbeats)), _deadly(Path(heartbeats), who, step, time, rank):
        try:
            save(root, number, trainable, settings, background=True)
            mbridge_fsdp_ckpt.finish_saves()
        except CheckpointError as error:
            return type(error).__name__
    return "saved"


@contextmanager
def _deadly(heartbeats: Path, who: Who, step: str, time: int, rank: int) -> Iterator[None]:
    """Writers that are started meanwhile are mortal."""
    if dist.get_rank() != rank:
        yield
        return
    with in_writer.told(make_mortal, str(heartbeats), who, step, time):
        yield


def make_mortal(heartbeats: str, who: Who, step: str, time: int) -> None:
    """In a writer, before it does anything: see to it that it dies at its step."""
    patched(call_of(step), lambda function: _killing(function, Path(heartbeats), who, time)).start()


def _killing(function: Callable[..., Any], heartbeats: Path, who: Who, time: int) -> Callable[..., Any]:
    calls = itertools.count(1)

    def killing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == time:
            (heartbeats / "died").touch()
            if who != "writer":
                _kill_trainer()
            if who != "trainer":
                os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return killing


def _kill_trainer() -> None:
    """And wait until it is gone: whatever is said to it from here on fails."""
    trainer = os.getppid()
    os.kill(trainer, signal.SIGKILL)
    while os.getppid() == trainer:
        sleep(0.001)
