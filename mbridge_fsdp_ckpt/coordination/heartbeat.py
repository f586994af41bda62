# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Heartbeats: what a rank gives while it works, and how long others wait for it.

Two threads of a rank give them.  The one that works does after each step (`Heartbeats.give`).  While it is inside a
single call of the storage, which may take minutes (a flush, a rename), the pulse does it in its place
(`Heartbeats.at_work`): for as long as the last step of the work is not older than the storage limit.  A process that
died has no pulse, and one that is stuck for good loses it.
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
"""What a call of the rendezvous store raises once nobody serves it any more."""

_SELDOM = 5.0  # seconds between heartbeats, where the limit is long
_PER_SECOND = 1000  # heartbeats that all ranks together give, at most
_log = logging.getLogger(__name__)


def key_of(name: str) -> str:
    """Where the heartbeats in a sequence of meetings are counted: one counter for all sequences of a kind."""
    return f"{name.rpartition('/')[0] or name}/beats"


class Heartbeats:
    """The heartbeats of all ranks in one sequence of meetings: a number in the store, which each adds to.

    Args:
        store: The store; None with a single rank.
        name: The sequence's.
        time_limit: Seconds without any sign after which who waits gives up.
        storage_limit: Seconds without a step of a rank's own after which its pulse stops.
        world_size: Ranks that give heartbeats: the more, the more seldom each does.
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
        """Whether the work stands still: inside one call of the storage for longer than its limit."""
        return self._works and time.monotonic() - self._last_step > self._storage_limit

    def give(self) -> None:
        """A step of the work is done.  Cheap: most calls send nothing."""
        self._last_step = now = time.monotonic()
        if self._store is not None and now - self._sent > self._pause:
            self._sent = now
            self._store.add(self._key, 1)

    def count(self) -> int:
        """How many heartbeats all ranks have given."""
        return 0 if self._store is None else self._store.add(self._key, 0)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """While the block runs, storage calls in it are no silence.  Blocks may be nested."""
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
                _log.info("no more heartbeats can be given: %s", error)
                return


class Watch:
    """Time since the start or since the last heartbeat of any rank, as far as this process was running.

    A process that was stopped, or whose host was, must not take the others for dead when it goes on: of the time
    between two looks, which follow each other every fraction of the limit, no more than a quarter of it counts.

    Args:
        heartbeats: What to look at.
        limit: Seconds without a sign until it is over.
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
