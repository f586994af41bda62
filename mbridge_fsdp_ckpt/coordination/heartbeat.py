# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Heartbeats: signs that a rank still works, for which other ranks wait longer.

Two threads of a rank give them.  The thread that works gives one after each step (`Heartbeats.give`).  While it is
inside a single call of the storage, which may take minutes (a flush, a rename), another thread, the pulse, gives them
(`Heartbeats.at_work`), until the last step is older than the storage limit.  So a process that died gives none, and
one that is stuck stops.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from mbridge_fsdp_ckpt.coordination.connection import Store

STORE_ERRORS = dist.DistError, ConnectionError, OSError
"""The exceptions that a request to the rendezvous store raises once no process serves it any more."""

_SELDOM = 5.0  # seconds between heartbeats, where the limit is long
_PER_SECOND = 1000  # heartbeats that all ranks together give, at most
_log = logging.getLogger(__name__)


def key_of(name: str) -> str:
    """The store's key that counts the heartbeats of a sequence: one counter for all sequences of a kind."""
    return f"{name.rpartition('/')[0] or name}/beats"


class Heartbeats:
    """The heartbeats of all ranks in one sequence of meetings: a number in the store, to which each rank adds.

    Args:
        store: The store; None with a single rank.
        name: The name of the sequence.
        time_limit: Seconds without a heartbeat of any rank after which a waiting rank gives up.
        storage_limit: Seconds without a step of this rank's work after which its pulse stops.
        world_size: The number of ranks that give heartbeats.  The more there are, the less often each gives one.
    """

    def __init__(
        self, store: Store | None, name: str, time_limit: float, storage_limit: float, world_size: int
    ) -> None:
        self._store, self._key, self._storage_limit = store, key_of(name), storage_limit
        self._pause = min(max(_SELDOM, world_size / _PER_SECOND), time_limit / 8)
        self._sent, self._last_step = 0.0, 0.0
        self._has_pulse, self._works = False, False

    @property
    def has_stopped(self) -> bool:
        """Whether this rank is inside one call of the storage for longer than the storage limit."""
        return self._works and time.monotonic() - self._last_step > self._storage_limit

    def give(self) -> None:
        """Give a heartbeat after a step of the work.  Cheap: most calls send nothing."""
        self._last_step = now = time.monotonic()
        if self._store is not None and now - self._sent > self._pause:
            self._sent = now
            self._store.add(self._key, 1)

    def count(self) -> int:
        """The number of heartbeats that all ranks have given."""
        return 0 if self._store is None else self._store.add(self._key, 0)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Give heartbeats from another thread while the block runs.  Blocks may be nested."""
        self._last_step = time.monotonic()
        outer, self._works = self._works, True
        try:
            with self._with_pulse():
                yield
        finally:
            self._works = outer

    @contextmanager
    def _with_pulse(self) -> Iterator[None]:
        if self._store is None or self._has_pulse:
            yield
            return
        over = threading.Event()
        pulse = threading.Thread(target=self._pulse, args=(self._store, over), name="heartbeats", daemon=True)
        self._has_pulse = True
        pulse.start()
        try:
            yield
        finally:
            over.set()
            pulse.join(self._pause)  # it may be in a call of a store that has gone
            self._has_pulse = False

    def _pulse(self, store: Store, over: threading.Event) -> None:
        while not over.wait(self._pause):
            if time.monotonic() - self._last_step > self._storage_limit:
                continue
            try:
                store.add(self._key, 1)
            except STORE_ERRORS as error:  # the next meeting raises it
                _log.info("this rank stops giving heartbeats: the store does not answer: %s", error)
                return


class Watch:
    """The time since the start or since the last heartbeat of any rank, in which this process was running.

    A process that was stopped, or whose host was, must not take the other ranks for dead when it continues.  So between
    two calls of `over`, at most a quarter of the limit counts.

    Args:
        heartbeats: The heartbeats to watch.
        limit: Seconds without a heartbeat until the watch is over.
    """

    def __init__(self, heartbeats: Heartbeats, limit: float) -> None:
        self._heartbeats, self._limit = heartbeats, limit
        self._last_look, self._waited, self._heartbeats_seen = time.monotonic(), 0.0, -1
        self._next_count, self._count_every = self._last_look, min(1.0, limit / 8)

    def over(self) -> bool:
        """Whether the limit has passed."""
        now = time.monotonic()
        self._waited += min(now - self._last_look, self._limit / 4)
        self._last_look = now
        if now >= self._next_count:
            self._next_count = now + self._count_every
            count = self._heartbeats.count()
            if count != self._heartbeats_seen:
                self._heartbeats_seen, self._waited = count, 0.0
        return self._waited > self._limit
