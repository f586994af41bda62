# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A job of plain processes that is hit by signals, stopped for a while, or forks, at each step of a background save.

RANK=... WORLD_SIZE=... MASTER_ADDR=... MASTER_PORT=... python -m tests.soak.signals ROOT ROW...

A row is "HOW/WHERE/STEP".  For each, a rank prints one line of JSON: what it saw (`Seen`).

HOW     SIGTERM, SIGUSR1, SIGINT    to every process of the job, as SLURM sends them; trainers have handlers
        half, twice                 SIGSTOP to one process, for that part of the time limit
        fork                        a data loader with a forked worker runs from its start to its end
WHERE   trainer0, trainer1          a training process; the first one serves the rendezvous store
        writer0, writer1            a checkpoint process
STEP    in a trainer: see `IN_TRAINER`; in a writer the function that is about to be called
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt import Settings
from mbridge_fsdp_ckpt.errors import CheckpointError
from testing import cpu_cuda
from tests.patched import patched
from tests.soak import in_writer, kill_beside
from tests.soak.kill import call_of

LIMIT_S = 4.0
SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")
STOPS = {"half": LIMIT_S / 2, "twice": LIMIT_S * 2}

IN_TRAINER = (
    "idle",
    "begun",
    "saving.background.order:plan_save",
    "live.local_shards:LocalShard.elements",
    "add_files",
    "after_commit",
)
"""Before a save; as its call has returned; in the thread that plans and copies; in callbacks, of rank 0 alone."""

IN_WRITER = tuple(
    dict.fromkeys(step.name for step in (*kill_beside.WRITERS_STEPS, *kill_beside.OWN_STEPS) if step.fresh)
)


@dataclass(frozen=True, slots=True)
class Row:
    """See above."""

    how: str
    where: str
    step: str

    @classmethod
    def of(cls, text: str) -> Row:
        """As `name` has it."""
        return cls(*text.split("/"))

    @property
    def name(self) -> str:
        """As it is given to the job."""
        return f"{self.how}/{self.where}/{self.step}"


@dataclass(slots=True)
class Seen:
    """What a rank saw of a row.

    Args:
        row: Its name.
        hit: Whether the step was taken, on any rank.
        errors: What each call raised, in their order.
        survived: Whether the checkpoint process is the one that it was before.
        handled: Signals that the trainer's handlers got.
        targets: Where the save under way and the next one went.
    """

    row: str
    hit: bool = False
    errors: list[str] = field(default_factory=list)
    survived: bool = False
    handled: int = 0
    targets: list[str] = field(default_factory=list)


def rows() -> list[Row]:
    """All of them."""
    found = [Row(how, "writer0", step) for how in SIGNALS for step in IN_WRITER]
    found += [Row(how, "trainer0", step) for how in (*SIGNALS, "fork") for step in IN_TRAINER]
    found += [Row(how, f"writer{rank}", step) for how in STOPS for rank in (0, 1) for step in _steps_of(rank)]
    found += [Row(how, "trainer0", step) for how in STOPS for step in IN_TRAINER]
    return found + [
        Row(how, "trainer1", step) for how in STOPS for step in IN_TRAINER if ":" in step or step == "begun"
    ]


def _steps_of(rank: int) -> list[str]:
    every = (*kill_beside.WRITERS_STEPS, *kill_beside.OWN_STEPS)
    return list(dict.fromkeys(step.name for step in every if step.fresh and rank in step.ranks))


def in_writers(root: str, rank: int) -> None:
    """In a writer, before it does anything else: see to it that what is to happen at its steps happens."""
    hits = Hits(Path(root), f"writer{rank}")
    for step in IN_WRITER:
        patched(call_of(step), hits.before(step)).start()


class Hits:
    """What happens in one process at its steps: the file `row` says what, and it happens once.

    Args:
        root: Of the job.
        where: See above.
    """

    def __init__(self, root: Path, where: str) -> None:
        self._root, self._where = root, where

    def before(self, step: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """For `patched`."""

        def make(function: Callable[..., Any]) -> Callable[..., Any]:
            def hit_first(*args: Any, **kwargs: Any) -> Any:
                self.at(step)
                return function(*args, **kwargs)

            return hit_first

        return make

    def at(self, step: str) -> None:
        """The process is about to take a step."""
        if not (self._root / "row").exists():
            return
        number, text = (self._root / "row").read_text().split(" ")
        row, hit = Row.of(text), self._root / f"hit-{number}"
        if (row.where, row.step) != (self._where, step) or hit.exists():
            return
        hit.touch()
        if row.how == "fork":
            assert len(list(DataLoader(range(4), num_workers=1, multiprocessing_context="fork"))) == 4  # type: ignore[arg-type]
        elif row.how in STOPS:
            _apart(f"kill -STOP {os.getpid()}; sleep {STOPS[row.how]}; kill -CONT {os.getpid()}")
        else:
            _apart(f"kill -{row.how[3:]} {(self._root / 'processes').read_text()}")


def _apart(script: str) -> None:
    """Let another session do something to this process, and give it the time for that."""
    subprocess.Popen(["sh", "-c", script], start_new_session=True)
    time.sleep(0.5)


def descendants(process_id: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    tasks = Path(f"/proc/{process_id}/task").glob("*/children")
    children = [int(child) for task in tasks for child in task.read_text().split()]
    return [*children, *itertools.chain.from_iterable(map(descendants, children))]


class Job:
    """A rank.

    Args:
        root: Where its checkpoints go, and what its processes tell each other.
    """

    def __init__(self, root: Path) -> None:
        from tests.core import beside

        self._root, self._rank = root, dist.get_rank()
        self._hits = Hits(root, f"trainer{self._rank}")
        self._run = beside.Run(str(root / "run"), settings=Settings(time_limit=LIMIT_S))
        self._handled: Counter[str] = Counter()
        for name in SIGNALS:
            signal.signal(getattr(signal, name), lambda number, frame: self._handled.update([str(number)]))

    @contextmanager
    def hit(self) -> Iterator[None]:
        """While the block runs, what is to happen in this process happens."""
        steps = [step for step in IN_TRAINER if ":" in step]
        with in_writer.told(in_writers, str(self._root), self._rank):
            patches = [patched(call_of(step), self._hits.before(step)) for step in steps]
            for patch in patches:
                patch.start()
            try:
                self._run.warm()
                yield
            finally:
                for patch in patches:
                    patch.stop()

    def take(self, number: int, row: Row) -> Seen:
        """A save with what happens in it, and the next one: made as a training makes it that was told to end."""
        seen, before = Seen(row.name), self._writer()
        self._tell_all(number, row)
        self._hits.at("idle")
        self._try(seen, self._save)
        self._hits.at("begun")
        self._try(seen, self._run.step)
        dist.barrier()
        self._try(seen, self._save)
        self._try(seen, mbridge_fsdp_ckpt.finish_saves)
        dist.barrier()
        seen.survived, seen.handled = self._writer() == before, self._handled.total()
        seen.hit = (self._root / f"hit-{number}").exists()
        seen.targets = [str(self._root / "run" / f"iter_{self._run.number - back:07d}") for back in (1, 0)]
        self._try(Seen(""), self._run.warm)  # a writer that ended is replaced: the next row begins with one that runs
        dist.barrier()
        return seen

    def _writer(self) -> int:
        from mbridge_fsdp_ckpt.saving.background.async_saves import async_saves

        writer = async_saves()._writer
        return writer.pid if writer is not None and writer.error is None else 0

    def _tell_all(self, number: int, row: Row) -> None:
        self._handled.clear()
        everybodys: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybodys, [os.getpid(), *descendants(os.getpid())])
        if self._rank == 0:
            (self._root / "processes").write_text(" ".join(map(str, itertools.chain.from_iterable(everybodys))))
            (self._root / "new").write_text(f"{number} {row.name}")
            (self._root / "new").rename(self._root / "row")
        dist.barrier()

    def _save(self) -> None:
        at = self._hits.at
        self._run.save(add_files=lambda folder: at("add_files"), after_commit=lambda: at("after_commit"))

    def _try(self, seen: Seen, call: Callable[[], object]) -> None:
        try:
            call()
        except CheckpointError as error:
            seen.errors.append(type(error).__name__)


def main(root: Path, names: list[str]) -> None:
    """Take rows, one after the other."""
    import megatron.core.distributed.fsdp.mcore_fsdp_adapter  # noqa: F401 - before CUDA is replaced

    cpu_cuda.install()
    dist.init_process_group("gloo")
    job = Job(root)
    with job.hit():
        for number, name in enumerate(names):
            print(json.dumps(asdict(job.take(number, Row.of(name)))), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    from tests.soak import signals  # by its own name, which writers know

    signals.main(Path(sys.argv[1]), sys.argv[2:])
