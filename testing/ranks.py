# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A pool of rank processes that run many distributed test cases, one after another.

Importing Megatron-Bridge takes longer than most cases, so it is imported once for all ranks, and the processes serve
case after case, cleaned up in between.  A case that fails shows the traceback of every rank that failed; one that
hangs shows the Python stack of every rank that had not finished.

    with RankPool(4) as pool:
        results = pool.run(function, argument, ranks=2)     # [result of rank 0, result of rank 1]
"""

from __future__ import annotations

import pickle
import sys
import tempfile
import weakref
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from testing.messages import Case, FunctionName, no_process_group, wants_process_group
from testing.outcomes import Died, RankFailed, RanksHung
from testing.process import TemplateProcess, WorkerProcess
from testing.running_case import GRACE_S, RunningCase
from testing.templates import Templates

__all__ = ["Died", "RankFailed", "RankPool", "RanksHung", "no_process_group"]

WORN_OUT_THREADS = 48
"""Threads from which a worker ends after its case.  gloo's groups keep theirs after they were destroyed, and they poll:
a Megatron case on four ranks leaves a hundred, which take a tenth of a core for as long as the worker lives."""


class RankPool:
    """`size` worker processes that serve as the ranks of one case after another.

    Args:
        size: the largest world size.
        time_limit: seconds that a case may take, unless `run` says otherwise.
        preload: modules to import before CUDA is replaced.
        templates: processes that other pools fork from, too; else this pool has its own.
        nan_memory: whether memory that a case has not written yet holds NaN, which takes time; see `fresh_memory`.

    The first case starts a process that does all the imports, and the workers are forked from it; one that has to be
    replaced costs nothing.  Not for concurrent use.  All processes end with the thread that started them.
    """

    def __init__(
        self,
        size: int,
        *,
        time_limit: float = 120.0,
        preload: Sequence[str] = (),
        templates: Templates | None = None,
        nan_memory: bool = True,
    ) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one rank, got size={size}")
        self.size = size
        self.time_limit = time_limit
        self.preload = tuple(preload)
        self.nan_memory = nan_memory
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._templates = templates or Templates()
        self._template: TemplateProcess | None = None
        self._workers: dict[int, WorkerProcess] = {}
        own = self._templates if templates is None else None
        self._finalizer = weakref.finalize(self, _end, own, self._workers, self._folder)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def processes(self) -> dict[int, int]:
        """The process id of every worker that was started, by rank."""
        return {rank: worker.process_id for rank, worker in self._workers.items()}

    def close(self) -> None:
        """End all workers; the pool cannot be used afterwards.  Calling it again does nothing."""
        self._finalizer()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int | None = None,
        time_limit: float | None = None,
        may_die: Collection[int] = (),
        **kwargs: Any,
    ) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank of a fresh world; return the results by rank.

        Args:
            function: a module-level function; workers import its module.
            *args: its positional arguments.  Arguments and results are pickled.
            ranks: the world size, at most `size`, which is the default.
            time_limit: seconds from here until RanksHung; starting workers does not count.
            may_die: ranks that may end without failing the case; their result is then a `Died`.
            **kwargs: its keyword arguments; the three names above cannot be among them.

        Raises:
            RankFailed: a rank raised or died.  The others get a few seconds to finish.
            RanksHung: the time limit passed first.
        """
        world = range(self.size if ranks is None else ranks)
        self._check(world, may_die)
        name, arguments = FunctionName.of(function), pickle.dumps((args, kwargs))
        self.start(len(world))
        limit = self.time_limit if time_limit is None else time_limit
        store = _start_store()
        running = RunningCase(
            f"{name.module}.{name.qualname}", {rank: self._workers[rank] for rank in world}, limit, may_die
        )
        try:
            for rank in world:
                case = Case(
                    function=name,
                    arguments=arguments,
                    sys_path=tuple(sys.path),
                    rank=rank,
                    world_size=len(world),
                    store_port=store.port,
                    timeout_s=limit + 2 * GRACE_S,  # so that the pool, which sees all ranks, speaks before gloo does
                    process_group=wants_process_group(function),
                    nan_memory=self.nan_memory,
                )
                self._workers[rank].serve(case)
            return running.results()
        finally:
            living = {rank for rank in world if self._workers[rank].is_alive}
            worn_out = {rank for rank in living if self._workers[rank].threads > WORN_OUT_THREADS}
            self._discard(running.waiting | running.unusable | worn_out)

    def start(self, ranks: int | None = None) -> None:
        """Start the workers of the first `ranks` ranks that do not run; `run` does so where it must."""
        template = self._living_template()
        for rank in range(self.size if ranks is None else ranks):
            if rank in self._workers and not self._workers[rank].is_alive:
                self._discard([rank])
            if rank not in self._workers:
                self._workers[rank] = template.fork(rank, Path(self._folder.name))

    def _living_template(self) -> TemplateProcess:
        """The process to fork workers from; its end was the end of its workers."""
        if self._template is None or not self._template.is_alive:
            self._discard(self._workers)
            self._template = self._templates.living(self.preload)
        return self._template

    def _check(self, world: range, may_die: Collection[int]) -> None:
        if not self._finalizer.alive:
            raise ValueError("the pool is closed")
        if not 1 <= len(world) <= self.size:
            raise ValueError(f"this pool runs cases on 1 to {self.size} ranks, not on {len(world)}")
        if not set(may_die) <= set(world):
            raise ValueError(f"may_die={sorted(may_die)} names ranks that a world of {len(world)} does not have")

    def _discard(self, ranks: Collection[int]) -> None:
        for rank in list(ranks):
            self._workers.pop(rank).kill()


def _start_store() -> Any:
    """A store on a free port, in this process: it outlives any rank, so a rank that dies takes nothing with it."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _end(
    templates: Templates | None, workers: dict[int, WorkerProcess], folder: tempfile.TemporaryDirectory[str]
) -> None:
    while workers:
        workers.popitem()[1].kill()
    if templates is not None:
        templates.close()
    folder.cleanup()
