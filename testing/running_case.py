# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A case while it runs: gather what the ranks report, and tell what went wrong so that it can be understood."""

from __future__ import annotations

import pickle
import time
from collections.abc import Collection, Mapping
from multiprocessing.connection import wait
from typing import Any

from testing.messages import Cleaned, Raised, Returned
from testing.outcomes import Died, RankFailed, RanksHung
from testing.process import WorkerProcess

GRACE_S = 5.0
"""How long the other ranks may go on after the first one failed."""

_CLEAN_UP_S = 20.0  # a checkpoint process has ten seconds to end

_POLL_S = 0.1


class RunningCase:
    """One case on one worker per rank, from the moment it was sent.

    A rank that returned keeps its process groups until all have: the others may still be connecting to it.  A rank
    that raised closes them at once, so that ranks that wait for it notice.

    Attributes:
        waiting: the ranks whose workers have not finished, clean-up included.
        unusable: the ranks that could not be cleaned up.
    """

    def __init__(
        self, title: str, workers: Mapping[int, WorkerProcess], limit: float, may_die: Collection[int]
    ) -> None:
        self.waiting = set(workers)
        self.unusable: set[int] = set()
        self._running = set(workers)
        self._title = title
        self._workers = workers
        self._limit = limit
        self._may_die = may_die
        self._deadline = time.monotonic() + limit
        self._results: dict[int, bytes | Died] = {}
        self._failed: dict[int, str] = {}

    def results(self) -> list[Any]:
        """Wait for every rank; return the results by rank, or raise RankFailed or RanksHung."""
        while self._running and time.monotonic() < self._deadline:
            self._listen()
        stacks = {rank: self._workers[rank].stacks() for rank in sorted(self._running)}
        limit = f"{self._limit:g} s" if stacks else f"{_CLEAN_UP_S:g} s of cleaning up"
        stacks |= self._finish()
        if self._failed:
            raise RankFailed(self._describe_failure(stacks), self._failed)
        if stacks:
            raise RanksHung(self._describe_hang(stacks, limit), stacks)
        results = [self._results[rank] for rank in sorted(self._results)]
        return [result if isinstance(result, Died) else pickle.loads(result) for result in results]

    def _finish(self) -> dict[int, str]:
        """Let the ranks that returned clean up; return the stacks of those that do not get done."""
        for rank in self._results.keys() & self.waiting:
            self._workers[rank].clean_up()
        deadline = time.monotonic() + _CLEAN_UP_S
        while self.waiting - self._running and time.monotonic() < deadline:
            self._listen()
        return {rank: self._workers[rank].stacks() for rank in sorted(self.waiting - self._running)}

    def _listen(self) -> None:
        """Take one message from each rank that has one, and notice the ranks that ended."""
        rank_of = {self._workers[rank].connection: rank for rank in self.waiting}
        ready = wait(list(rank_of), timeout=_POLL_S)
        for connection, rank in rank_of.items():
            try:
                if connection in ready:
                    self._receive(rank, connection.recv())
                elif not self._workers[rank].is_alive and not connection.poll():
                    self._end(rank)
            except (EOFError, ConnectionResetError):
                self._end(rank)

    def _receive(self, rank: int, message: Returned | Raised | Cleaned) -> None:
        match message:
            case Returned(result):
                self._running.remove(rank)
                self._results[rank] = result
            case Raised(traceback):
                self._running.remove(rank)
                self._fail(rank, traceback)
                self._workers[rank].clean_up()
            case Cleaned(error):
                self.waiting.remove(rank)
                if error is not None:
                    self.unusable.add(rank)
                    self._fail(rank, f"the clean-up after the case failed:\n{error}")

    def _end(self, rank: int) -> None:
        self.waiting.remove(rank)
        self._running.discard(rank)
        returncode = self._workers[rank].returncode()
        if rank in self._may_die:
            self._results[rank] = Died(returncode)
        else:
            self._fail(rank, f"the process ended with return code {returncode}")

    def _fail(self, rank: int, text: str) -> None:
        self._failed.setdefault(rank, text)
        self._deadline = min(self._deadline, time.monotonic() + GRACE_S)

    def _describe_failure(self, stacks: Mapping[int, str]) -> str:
        sections = [f"{self._title}: failed on rank {_enumerate(self._failed)} of {len(self._workers)}"]
        for rank, text in self._failed.items():
            sections += [f"--- rank {rank} failed ---\n{text.rstrip()}", self._printed(rank)]
        sections += [f"--- rank {rank} had not finished ---\n{stack}" for rank, stack in stacks.items()]
        return "\n".join(section for section in sections if section)

    def _describe_hang(self, stacks: Mapping[int, str], limit: str) -> str:
        waiting = f"rank {_enumerate(stacks)} of {len(self._workers)} had not finished after {limit}"
        sections = [f"{self._title}: {waiting}"]
        for rank, stack in stacks.items():
            sections += [f"--- rank {rank} ---\n{stack}", self._printed(rank)]
        return "\n".join(section for section in sections if section)

    def _printed(self, rank: int) -> str:
        tail = self._workers[rank].log_tail()
        return f"--- rank {rank} printed ---\n{tail}" if tail else ""


def _enumerate(ranks: Collection[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
