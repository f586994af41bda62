# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of asynchronous saves."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt import Settings
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.saving.background.async_saves import async_saves
from testing import fresh_memory
from testing.models import Recipe
from tests.core import cases, oracle
from tests.soak.kill import iteration

SMALL = Recipe(layers=1)


def save_every_step(root: str, recipe: Recipe, steps: int, settings: Settings, background: bool) -> dict[str, Any]:
    """Training with a save after every step: losses, and whether each save had its snapshot when the next ended."""
    trainable = cases.prepared(recipe, steps=1)
    losses: list[float] = []
    taken: list[bool] = []
    for number in range(1, steps + 1):
        saving = (mbridge_fsdp_ckpt.async_save if background else mbridge_fsdp_ckpt.save)(
            iteration(root, number),
            model=trainable.model,
            optimizer=trainable.optimizer,
            values={"iteration": number, "losses": losses},
            rank_values={"losses": losses},
            settings=settings,
        )
        losses.append(trainable.step(number))
        taken.append(saving.taken if isinstance(saving, mbridge_fsdp_ckpt.SaveHandle) else True)
    mbridge_fsdp_ckpt.finish_saves()
    return {"losses": losses, "taken": taken}


LIMIT_S = 3.0
QUICK = Settings(time_limit=LIMIT_S)
PATIENT = Settings(time_limit=60.0)
"""Where a writer is stopped for a while, on a machine that does other things, too."""


class Run:
    """A rank that trains, and saves beside that.

    Args:
        root: Where its checkpoints go.
        recipe: Its model.
        settings: Of its saves.
    """

    def __init__(self, root: str, recipe: Recipe = SMALL, settings: Settings = QUICK) -> None:
        self.root, self.settings = root, settings
        self.trainable = cases.prepared(recipe, steps=1)
        self.number = 0

    def save(self, **more: Any) -> mbridge_fsdp_ckpt.SaveHandle:
        """Begin the save of the next iteration."""
        self.number += 1
        return mbridge_fsdp_ckpt.async_save(
            iteration(self.root, self.number),
            model=self.trainable.model,
            optimizer=self.trainable.optimizer,
            values={"iteration": self.number},
            settings=self.settings,
            **more,
        )

    def step(self) -> None:
        self.trainable.step(self.number)

    def warm(self) -> None:
        """A save that goes well: from now on the writer runs."""
        self.save()
        mbridge_fsdp_ckpt.finish_saves()

    def writer(self, signal_number: int) -> None:
        """Send a signal to this rank's writer."""
        writer = async_saves()._writer
        assert writer is not None
        os.kill(writer.pid, signal_number)

    def ended(self) -> dict[str, Any]:
        """What the save that goes on comes to, and how long that takes."""
        start = time.monotonic()
        try:
            mbridge_fsdp_ckpt.finish_saves()
        except CheckpointError as error:
            return {**error.to_wire(), "seconds": time.monotonic() - start}
        return {"error": None, "seconds": time.monotonic() - start}


def writer_ends(root: str, victim: int, how: Literal["killed", "stopped"]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A save whose writer of one rank is killed, or stopped for good, before it has read a word; and the next one."""
    run = Run(root)
    run.warm()
    dist.barrier()
    if dist.get_rank() == victim:
        run.writer(signal.SIGSTOP)
    saving = run.save()
    saving.wait_until_taken()
    if dist.get_rank() == victim and how == "killed":
        run.writer(signal.SIGKILL)
    first = run.ended()
    run.step()
    run.save()
    return first, run.ended()


def trainer_dies(root: str, victim: int) -> dict[str, Any]:
    """One rank is killed while another one's writer still has to write: what the survivor hears."""
    run = Run(root, settings=PATIENT)
    run.warm()
    dist.barrier()
    if dist.get_rank() != victim:
        run.writer(signal.SIGSTOP)
    saving = run.save()
    saving.wait_until_taken()
    dist.barrier()
    if dist.get_rank() == victim:
        writer = async_saves()._writer
        assert writer is not None
        (Path(root) / "orphan").write_text(str(writer.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.0)
    run.writer(signal.SIGCONT)
    return run.ended()


def planning_fails(root: str, values: dict[Any, Any]) -> list[dict[str, Any]]:
    """A save that one rank cannot plan, for its values: what the next one raises; what the one after comes to."""
    run = Run(root)
    run.warm()
    bad = {"rank_values": values} if dist.get_rank() == 1 else {}
    run.save(**bad)
    run.step()
    try:
        run.save()
    except CheckpointError as error:
        found = [error.to_wire()]
    else:
        raise AssertionError("no error was raised")
    run.save()
    return [*found, run.ended()]


def skips(root: str) -> list[Any]:
    """Two saves, the second while the first goes on: whether it was skipped; and a third, once nothing goes on."""
    run = Run(root, settings=replace(PATIENT, when_busy="skip"))
    run.warm()
    dist.barrier()
    run.writer(signal.SIGSTOP)
    first = run.save()
    dist.barrier()
    second = run.save()
    dist.barrier()
    run.writer(signal.SIGCONT)
    first.wait()
    dist.barrier()
    third = run.save()
    return [second.skipped, not third.skipped, run.ended()["error"]]


def follows_up(root: str) -> list[Any]:
    """Saves with files of the caller's, and with a follow-up that fails."""
    run = Run(root)
    called: list[str] = []

    def add_files(staging: Path) -> None:
        (staging / "extra.txt").write_text("more")
        called.append(threading.current_thread().name)

    def fails() -> None:
        raise ValueError("the tracker is read-only")

    run.save(add_files=add_files, after_commit=lambda: called.append("after"))
    first = run.ended()
    run.save(after_commit=fails)
    return [called, first["error"], run.ended()]


def loads_meanwhile(root: str) -> bool:
    """A load right after a save began, of another state: whether what was saved is what was there before."""
    run = Run(root, settings=PATIENT)
    run.warm()
    run.step()
    run.writer(signal.SIGSTOP)
    before = oracle.live(run.trainable)
    run.save()
    mbridge_fsdp_ckpt.load(
        iteration(root, 1), model=run.trainable.model, optimizer=run.trainable.optimizer, settings=PATIENT
    )
    assert oracle.live(run.trainable) != before
    run.writer(signal.SIGCONT)
    mbridge_fsdp_ckpt.finish_saves()
    found = oracle.on_disk(iteration(root, 2))
    return {key: value for key, value in found.items() if key in before} == before


def memory(root: str, limit: int | None) -> dict[str, tuple[int, int]]:
    """Bytes of shared memory that this rank and its writer have: after a save, once it was released, after another."""
    fresh_memory.restore()  # staging memory takes pages as it is filled: here, with what is saved alone
    run = Run(root, SMALL.on(hidden=1024), replace(QUICK, staging_limit=limit))
    seen = {}
    run.warm()
    writer = async_saves()._writer
    assert writer is not None
    seen["saved"] = shared_memory(os.getpid()), shared_memory(writer.pid)
    mbridge_fsdp_ckpt.release_staging()
    until = time.monotonic() + 10.0
    while shared_memory(writer.pid) > 1 << 20 and time.monotonic() < until:
        time.sleep(0.01)  # the writer hears of it
    seen["released"] = shared_memory(os.getpid()), shared_memory(writer.pid)
    run.warm()
    seen["again"] = shared_memory(os.getpid()), shared_memory(writer.pid)
    return seen


def shared_memory(process_id: int) -> int:
    """Resident, in bytes."""
    for line in Path(f"/proc/{process_id}/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssShmem")
