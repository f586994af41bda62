# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What training waits for a save beside it: `python -m benchmarks.beside`.

Two real ranks or four, models of few large tensors and of many small ones, each in one run: saves of ours that wait,
and asynchronously; plain `torch.distributed.checkpoint` of the same tensors, its own two ways of saving
asynchronously (a thread, a process) among them; where it is installed, `torch_checkpointing`, which flushes nothing;
and one copy of the state in memory.  All take turns, each after a step and with steps after it until the checkpoint is
there, and find the memory that they take with the machine (see `benchmarks.memory`).  Medians of the slowest rank.
Staging memory that kinds keep between saves is all there at once: for the model of 4 GB, 24 GB are too few.  DCP's
process gets each tensor as an open file; where a rank has too many for that, PyTorch shares them by name.

    stall         in the call, and before the next optimizer step
    of memcpy     the stall, of one copy of the state in memory
    committed     from the call until the checkpoint is there
    steps         a step meanwhile, of a step with nothing beside it
    extra memory  at its peak, of what a rank holds of the state: of the training's process and those that write for it,
                  with all that such a process has: Python and torch take some 350 MiB (see `benchmarks.usage`)
"""

from __future__ import annotations

import resource
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import mbridge_fsdp_ckpt
from benchmarks import peers, plots
from benchmarks.harness import Numbers, in_turns, slowest, table, timed
from benchmarks.large import MODELS, Compared, Expected, OfModels, untrained
from benchmarks.memory import Reserve, trim
from benchmarks.usage import Usage, Watched
from testing.gpu.state import tensors
from testing.models import Recipe, Trainable

KINDS = (
    "ours",
    "ours, beside",
    "DCP",
    "DCP, thread",
    "DCP, process",
    *(("torch_checkpointing", "torch_checkpointing, process") if peers.IS_INSTALLED else ()),
)
MEMORY = "extra memory"
MEASURES = ("stall", "committed", "steps", MEMORY)
_FILES = 4
"""Open files of a tensor that DCP's process may need, rounded up: for 7,976 tensors 20,000 were too few."""

Begun = tuple[Callable[[], bool], Callable[[], float]]
"""Whether a save that has begun is committed, and what it stalled the training after its call."""


def measure(folder: str, recipe: Recipe, runs: int) -> tuple[Numbers, float]:
    """On every rank: its numbers, the first of each left out, and its bytes."""
    trainable = untrained(recipe)
    one = _Rank(Path(folder), trainable)
    numbers = in_turns(one.turn, runs)
    one.close()
    return numbers, float(sum(tensor.nbytes for _, tensor in tensors(trainable)))


class _Rank:
    """One rank's measurements.

    Args:
        folder: Where files go.
        trainable: What is saved.
    """

    def __init__(self, folder: Path, trainable: Trainable) -> None:
        self._folder, self._trainable = folder, trainable
        # DCP's thread and a step of the training would wait for each other in one process group
        self._group: Any = dist.new_group(backend="gloo")
        self._peers: dict[bool, peers.TorchCheckpointing] = {}
        self._steps = 0
        self._step()
        own = [tensor.nbytes for _, tensor in tensors(trainable)]
        if _FILES * len(own) > resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
            torch.multiprocessing.set_sharing_strategy("file_system")
        size = sum(own)
        self._expected, self._reserve, self._usage = Expected(size), Reserve(2 * size), Usage()

    def turn(self) -> Iterator[tuple[str, float]]:
        """Each kind once."""
        begin: dict[str, Callable[[Path], Begun]] = {
            "ours": self._ours,
            "ours, beside": self._beside,
            "DCP": self._plain,
            "DCP, thread": lambda place: self._plain(place, AsyncCheckpointerType.THREAD),
            "DCP, process": lambda place: self._plain(place, AsyncCheckpointerType.PROCESS),
            "torch_checkpointing": lambda place: self._theirs(place, background=False),
            "torch_checkpointing, process": lambda place: self._theirs(place, background=True),
        }
        for kind in KINDS:
            trim()
            with self._usage.of_steps():
                alone = [self._step() for _ in range(3)]
            yield "alone, a step", statistics.median(alone)
            yield "memcpy", self._memcpy()
            for measure, value in zip(MEASURES, self._save(kind, begin[kind]), strict=True):
                yield f"{kind}: {measure}", value
            self._clear()

    def _save(self, kind: str, begin: Callable[[Path], Begun]) -> tuple[float, float, float, float]:
        trim()
        dist.barrier()
        with self._reserve.free(), self._usage.of(kind) as watched:
            return *self._timed(begin, watched), watched.peak

    def _timed(self, begin: Callable[[Path], Begun], watched: Watched) -> tuple[float, float, float]:
        dist.barrier()
        watched.put_off()
        start = time.perf_counter()
        is_there, stalled = begin(self._folder / "saved")
        called = time.perf_counter() - start
        watched.steps = True
        steps: list[float] = []
        committed = time.perf_counter() - start if is_there() else 0.0
        while not committed or not steps:
            steps.append(self._step())
            committed = committed or (time.perf_counter() - start if self._all(is_there()) else 0.0)
        return called + stalled(), committed, statistics.median(steps)

    def _ours(self, place: Path) -> Begun:
        mbridge_fsdp_ckpt.save(place, model=self._trainable.model, optimizer=self._trainable.optimizer)
        return (lambda: True), (lambda: 0.0)

    def _beside(self, place: Path) -> Begun:
        start = time.perf_counter()
        saving = mbridge_fsdp_ckpt.async_save(place, model=self._trainable.model, optimizer=self._trainable.optimizer)
        called, own = time.perf_counter() - start, saving.stalled
        assert own <= called
        return (lambda: saving.done), (lambda: saving.stalled - own)

    def _plain(self, place: Path, kind: AsyncCheckpointerType | None = None) -> Begun:
        state = {f"{dist.get_rank()} {name}": tensor for name, tensor in tensors(self._trainable)}
        writer = dcp.FileSystemWriter(place, sync_files=True)
        if kind is None:
            dcp.save(state, storage_writer=writer)
            return (lambda: True), (lambda: 0.0)
        future: Any = dcp.async_save(
            state, storage_writer=writer, process_group=self._group, async_checkpointer_type=kind
        )
        return partial(_is_over, future), (lambda: 0.0)

    def _theirs(self, place: Path, *, background: bool) -> Begun:
        if background not in self._peers:
            self._peers[background] = peers.TorchCheckpointing(background=background)
        manager, state = self._peers[background], dict(tensors(self._trainable))
        future = manager.save(place, state)
        if future is None:
            return (lambda: True), (lambda: 0.0)
        hook = self._trainable.optimizer.optimizer.register_step_pre_hook(lambda *_: manager.wait_as_steps_do())

        def stalled() -> float:
            hook.remove()
            future.result()
            if not manager.waited:
                raise RuntimeError("no step of the optimizer has looked whether the snapshot was taken")
            return manager.waited

        return partial(_is_over, future), stalled

    def close(self) -> None:
        """Let what has been started end."""
        mbridge_fsdp_ckpt.finish_saves()
        for manager in self._peers.values():
            manager.close()

    def _all(self, done: bool) -> bool:
        found = torch.tensor(int(done))
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return bool(found)

    def _step(self) -> float:
        self._steps += 1
        return timed(lambda: self._trainable.step(self._steps))

    def _memcpy(self) -> float:
        own = [tensor for _, tensor in tensors(self._trainable)]
        with self._reserve.free():
            copies = [torch.empty_like(tensor).fill_(1) for tensor in own]  # memory that is in use
            return timed(lambda: [copy.copy_(tensor) for copy, tensor in zip(copies, own, strict=True)])

    def _clear(self) -> None:
        """Remove what was written: it is not to be trimmed while the next one is measured."""
        dist.barrier()
        if dist.get_rank() == 0:
            self._expected.check(self._folder / "saved")
            shutil.rmtree(self._folder / "saved")
        dist.barrier()


def _is_over(future: Any) -> bool:
    """Whether a save has ended; its error if it failed, for which the others would train on for ever."""
    if not future.done():
        return False
    future.result()
    return True


def compare(ranks: list[tuple[Numbers, float]]) -> Compared:
    """Medians of the slowest rank, and of the one that takes most memory."""
    found = slowest([own for own, _ in ranks])
    part = max(size for _, size in ranks)
    return {
        "bytes": sum(size for _, size in ranks),
        "seconds": {name: value for name, value in found.items() if not name.endswith(MEMORY)},
        "extra memory": {kind: found[f"{kind}: {MEMORY}"] for kind in KINDS},
        "of the state": {kind: found[f"{kind}: {MEMORY}"] / part for kind in KINDS},
    }


def section(one: Compared) -> list[str]:
    """One model on the page."""
    seconds = one["seconds"]
    copy, alone = seconds["memcpy"], seconds["alone, a step"]
    lines = [
        f"{one['bytes'] / 1e9:.2f} GB in all. One copy in memory: {1e3 * copy:.1f} ms. A step: {alone:.2f} s.\n",
    ]
    rows = []
    for kind in KINDS:
        stall, committed, step = (seconds[f"{kind}: {measure}"] for measure in ("stall", "committed", "steps"))
        during = f"{step / alone:.2f}" if committed > stall else ""
        memory = f"{one['of the state'][kind]:.2f}", f"{one['extra memory'][kind] / 2**20:.0f}"
        rows.append([kind, f"{1e3 * stall:.2f}", f"{stall / copy:.2f}", f"{committed:.2f}", during, *memory])
    head = ["", "stall, ms", "of memcpy", "committed, s", "steps", "extra memory, of the state", "MiB a rank"]
    return [*lines, *table(head, rows)]


BENCHMARK = OfModels(
    measure, compare, section, plots.beside, models=tuple(model for model in MODELS if model != "4 GB")
).benchmark("beside", "What training waits for a save beside it", __doc__)

if __name__ == "__main__":
    BENCHMARK.main()
