# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of VeRL's rollout, which wakes on the hosts that asynchronous saves write from."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock, patch

from mbridge_fsdp_ckpt import checkpoint
from mbridge_fsdp_ckpt.saving.background.async_saves import async_saves
from testing.modules import is_installed
from tests.core.beside import shared_memory
from tests.models.imported import gloo_gathers_uneven
from tests.patched import gone
from tests.verl import tiny
from tests.verl.tiny import Setup

HEARD_S = 20.0


@contextmanager
def web_servers() -> Iterator[None]:
    """A block in which VeRL's workers can be imported where nothing is installed that serves a rollout."""
    missing = [name for name in ("fastapi", "uvicorn") if not is_installed(name)]
    sys.modules.update({name: MagicMock() for name in missing})
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


class Run:
    """A rank of an actor with its rollout."""

    def __init__(self, setup: Setup) -> None:
        with web_servers():
            from tests.verl import rollouts

        self.setup, self.engine = setup, tiny.build(setup)
        self.worker = rollouts.worker_of(self.engine)
        self.number = 0

    def save(self, role: str = "actor") -> None:
        """Train a step and save, as VeRL's trainers let the worker do."""
        self.number += 1
        tiny.step(self.engine, self.number)
        with gloo_gathers_uneven():
            self.worker.save_checkpoint(f"{self.setup.directory}/global_step_{self.number}/{role}", None, self.number)

    def wake(self, mode: str = "naive") -> dict[str, int]:
        """Update the rollout's weights, as VeRL's trainers let the worker do; what the rollout found."""
        with gloo_gathers_uneven():
            asyncio.run(self.worker.update_weights(global_steps=self.number, mode=mode))
        found: dict[str, int] = self.worker.rollout.found
        return found

    @property
    def writer(self) -> int:
        """Its process."""
        writer = async_saves()._writer
        assert writer is not None
        return writer.pid

    def memory(self, until_below: int = 0) -> tuple[int, int]:
        """Shared memory of this process and its writer's, after some time if they are still to give any back."""
        until = time.monotonic() + HEARD_S
        while max(found := (shared_memory(os.getpid()), shared_memory(self.writer))) > until_below > 0:
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        return found

    @contextmanager
    def written_slowly(self) -> Iterator[None]:
        """A block in which no save can come to its end."""
        os.kill(self.writer, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.writer, signal.SIGCONT)


def wake_after_a_save(setup: Setup, mode: str) -> dict[str, Any]:
    """Bytes of shared memory around a wake, and around the save after it."""
    run = Run(setup)
    empty = shared_memory(os.getpid())
    run.save()
    async_saves().settle()
    saved = run.memory()
    found = run.wake(mode)
    woken = run.memory(saved[0] // 2)
    run.save()
    checkpoint.finish_saves()
    weights = run.worker.rollout.weights, run.worker.checkpoint_engine.weights
    return {
        "empty": empty,
        "saved": saved,
        "found": found,
        "woken": woken,
        "again": run.memory(),
        "weights": weights,
    }


def wake_during_a_save(setup: Setup) -> dict[str, Any]:
    """The same around a wake that a save outlasts: it has ended where this returns at all."""
    run = Run(setup)
    run.save()
    checkpoint.finish_saves()
    with run.written_slowly():
        run.save()
        run.wake()
        saving = async_saves()._saving
        assert saving is not None
        goes_on, during = not saving.done, run.memory()
    saving.wait()
    written = run.memory(min(during) // 2)  # the writer may hear of it later
    run.save()
    checkpoint.finish_saves()
    return {"goes on": goes_on, "during": during, "written": written, "again": run.memory()}


def train(setup: Setup, steps: int) -> None:
    """Save after every step and wake the rollout at once, as VeRL's trainers do."""
    run = Run(setup)
    for _ in range(steps):
        run.save()
        run.wake()
    checkpoint.finish_saves()


def replaced_and_put_back() -> dict[str, bool]:
    """Whether VeRL's worker groups find what they look for, and its own method is there again."""
    from mbridge_fsdp_ckpt.integrations.verl import install, uninstall

    with web_servers():
        from verl.single_controller.base.decorator import MAGIC_ATTR
        from verl.workers.engine_workers import ActorRolloutRefWorker as Worker

    ours = Worker.update_weights
    uninstall()
    stock = Worker.update_weights
    with gone("verl.workers.engine_workers:ActorRolloutRefWorker.update_weights"):
        install()
        left_out = not hasattr(Worker, "update_weights")
        uninstall()
    with patch.object(Worker, "update_weights", lambda worker: "at once"):
        install()
        at_once = Worker.update_weights(None)
        uninstall()
    put_back = Worker.update_weights is stock
    install()
    return {
        "replaced": ours is not stock and ours.__wrapped__ is stock,
        "awaited": inspect.iscoroutinefunction(ours) and inspect.iscoroutinefunction(stock),
        "asked of every worker": getattr(ours, MAGIC_ATTR) == getattr(stock, MAGIC_ATTR),
        "none is left out": left_out,
        "one that is not awaited": at_once == "at once",
        "put back": put_back,
        "replaced again": Worker.update_weights.__wrapped__ is stock,
    }
