# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The one exchange between ranks: each brings a message, these are combined, rank 0 decides, all get its decision.

It uses no collective.  Ranks meet in the job's rendezvous store, where waiting has a time limit and an error can name
the missing ranks (`meeting`).  A collective has neither: if a rank raises before it, the others wait until a watchdog
ends the job.

Rank 0 names each sequence of meetings, and says what it begins (`incarnation`).  If a rank begins something else, all
ranks fail.  Rank 0 serves the store in many jobs: after the last decision it stays until the other ranks have read it.

The cost of a meeting is a constant number of store requests for each rank, however many ranks there are.  Messages are
combined on a tree (`protocol`), and are bounded when they are: no rank handles a message from every rank.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist

from mbridge_fsdp_ckpt.coordination.connection import Connection, Store
from mbridge_fsdp_ckpt.coordination.heartbeat import STORE_ERRORS, Heartbeats, Watch
from mbridge_fsdp_ckpt.coordination.incarnation import KEPT, connection, end_without, hosts_of, incarnation
from mbridge_fsdp_ckpt.coordination.meeting import Meeting, lost
from mbridge_fsdp_ckpt.coordination.protocol import Node
from mbridge_fsdp_ckpt.coordination.rounds import Round, Wire, brought, combined, decided
from mbridge_fsdp_ckpt.errors import CheckpointError, ConfigurationError
from mbridge_fsdp_ckpt.settings import DEFAULT_STORAGE_LIMIT, DEFAULT_TIME_LIMIT

_log = logging.getLogger(__name__)
_spent: dict[tuple[str, int], deque[list[str]]] = {}
"""The store's keys of recent sequences, by kind and by rank that this process attends for; `_tidy` deletes old ones."""
_LONGEST = 1e9  # seconds
_unended: list[tuple[str, CheckpointError]] = []
"""Sequences whose end rank 0 could not write because the store did not answer, each with the error that it raised."""


@dataclass(slots=True)
class Coordination:
    """A sequence of meetings of all ranks.

    Args:
        name: The name of the sequence, common to all ranks and new for each sequence.
        rank: This rank.
        world_size: The number of ranks.
        time_limit: Seconds that a rank waits for the others at each meeting, counted from its own arrival or from
            the last heartbeat of any other rank.
        store: The store in which ranks meet; None with a single rank.
        storage_limit: Seconds that a rank may be inside one call of the storage before its heartbeats stop.
        on_heartbeat: Called with every heartbeat, in the thread that gives it.
        owned: The connection behind the store, if only this coordination uses it; else None.
        keys: The store's keys that this rank wrote, and deletes once no rank reads them any more.
    """

    name: str
    rank: int
    world_size: int
    time_limit: float
    store: Store | None = None
    storage_limit: float = DEFAULT_STORAGE_LIMIT
    on_heartbeat: Callable[[], None] = lambda: None
    owned: Connection | None = None
    _meetings: int = field(default=0)
    _fenced: bool = field(default=False)
    _last: Meeting | None = field(default=None)
    _ended: bool = field(default=False)
    keys: list[str] = field(default_factory=list)
    _heartbeats: Heartbeats = field(init=False)

    def __post_init__(self) -> None:
        self._heartbeats = Heartbeats(self.store, self.name, self.time_limit, self.storage_limit, self.world_size)

    @property
    def leads(self) -> int | None:
        """This rank if it combines the messages of a group of ranks, else None.  Each rank is in one group."""
        return self.rank if Node(self.rank, self.world_size).leads else None

    def meet[M, V](self, round: Round[M, V]) -> V:
        """Meet all ranks, and return the decision of rank 0.

        Raises:
            CheckpointError: The same on every rank: an error that a rank brought, or that a function of the round
                raised, or a `RankMissingError` that names the ranks that did not arrive.
        """
        self._meetings, self._fenced = self._meetings + 1, False
        decision: Wire[V]
        if self.store is None:
            own = brought(round, self.rank)
            decision = decided(round, own if "failed" in own else combined(round, [own["value"]], self.rank))
        else:
            name, renew = f"{self.name}/{self._meetings}", lambda: self.on_heartbeat()
            who = self.rank, self.world_size, self.time_limit, self._heartbeats
            self._last = Meeting(self.store, name, round, *who, renew, hosts_of(self.name))
            decision = self._last.meet()
            self.keys += self._last.keys(failed="failed" in decision)
        if "failed" in decision:
            error = CheckpointError.from_wire(decision["failed"])
            if not self.end() and self.rank == 0:
                _unended.append((self.name, error))
            raise error
        return decision["value"]

    def end(self) -> bool:
        """End the sequence after its last meeting.  Rank 0 stays until the other ranks have read the decision.

        `meet` calls it before it raises an error.

        Returns:
            Whether the end was written to the store.
        """
        if self._last is None or self.store is None or self._ended:
            return True
        self._ended = True
        try:
            if self.rank == 0:
                self.store.set(f"{self.name}/over", "")
            self._last.leave()
            self._tidy(self.store)
        except STORE_ERRORS as error:  # the decision is known here, and that is all that counts
            _log.info("rank %d could not end %s in the store: %s", self.rank, self.name, error)
            return False
        return True

    def make_up(self) -> None:
        """End earlier sequences that rank 0 could not end because the store did not answer.

        Rank 0 calls it before the first meeting; it does nothing on other ranks.

        Raises:
            DistError, OSError: The store does not answer.
        """
        while self.rank == 0 and self.store is not None and _unended:
            end_without(self.store, *_unended[-1])
            _unended.pop()

    def _tidy(self, store: Store) -> None:
        """Delete this rank's keys of earlier sequences, except the last ones, which a late rank may still read."""
        spent = _spent.setdefault((self.name.rpartition("/")[0], self.rank), deque())
        spent.append(self.keys)
        while len(spent) > KEPT:
            for key in spent.popleft():
                store.delete_key(key)

    def close(self) -> None:
        """Close the connection, if it is this coordination's own, and drop references, after all meetings."""
        self.on_heartbeat, self._last = lambda: None, None
        if self.owned is not None:
            self.owned.close()

    @contextmanager
    def another_connection(self) -> Iterator[Store]:
        """The job's store over another connection while the block runs, for code that waits inside the store."""
        job = incarnation()
        own = connection(job.host, job.port, self.time_limit)
        try:
            yield own.within(self.time_limit)
        finally:
            own.close()

    def fence(self) -> None:
        """Set the commit fence: from here on no other rank gives up, because rank 0 does what cannot be undone.

        Raises:
            CheckpointError: Another rank has failed or given up before; the error that all ranks raise.
        """
        if self._last is not None:
            self._last.fence()
        self._fenced = True

    def was_fenced(self) -> bool:
        """Whether the last meeting was fenced, or may have been: then rank 0 may have committed."""
        return self._fenced or (self._last is not None and self._last.was_fenced())

    @property
    def has_stopped(self) -> bool:
        """Whether this rank is inside one call of the storage for longer than its limit.  Read by another thread."""
        return self._heartbeats.has_stopped

    def heartbeat(self) -> None:
        """Give a heartbeat after a step of long work; it restarts the time limit of waiting ranks.  Cheap to call."""
        self.on_heartbeat()
        self._heartbeats.give()

    def watch(self) -> Watch:
        """A watch for a wait outside a meeting: over when the time limit has passed without a heartbeat of any rank."""
        return Watch(self._heartbeats, self.time_limit)

    def at_work(self) -> AbstractContextManager[None]:
        """A block in which a thread gives heartbeats while a call of the storage takes long.

        Put it around all storage access between meetings, on any rank:

            with coordination.at_work():
                for item in items:
                    write(item)         # may block for up to the storage limit
                    coordination.heartbeat()    # a step is done: the storage limit restarts

        The coordinator is inside such a block already, and blocks may be nested.  Leave out code that waits for other
        ranks or for anything but the storage: a rank that is stuck there has to be named within the time limit.
        """
        return self._heartbeats.at_work()


def next_coordination(
    purpose: str, time_limit: float = DEFAULT_TIME_LIMIT, storage_limit: float = DEFAULT_STORAGE_LIMIT
) -> Coordination:
    """Begin the next sequence of meetings of all ranks.  Every rank calls it once in each save or load, first.

    Args:
        purpose: What the sequence is for, and where: "save to /checkpoints/iter_0000010".
        time_limit: Seconds that a rank waits for the others at each meeting.
        storage_limit: Seconds that a rank may be inside one call of the storage before its heartbeats stop.

    Raises:
        ConfigurationError: A limit is not positive, or the ranks begin different things.
        RankMissingError: The store does not answer, or rank 0 has not begun.
    """
    check_limits(time_limit, storage_limit)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Coordination(purpose, 0, 1, time_limit)
    job = incarnation()
    try:
        name = job.join("call", purpose, "", (time_limit, storage_limit)).name
        store = job.store(time_limit, "call")
        coordination = Coordination(name, job.rank, job.world_size, time_limit, store, storage_limit)
        coordination.make_up()
    except STORE_ERRORS as error:
        raise lost(error, purpose, job.rank) from error
    return coordination


def check_limits(time_limit: float, storage_limit: float) -> None:
    """Refuse limits that are not positive, or longer than threads and stores can wait.

    Raises:
        ConfigurationError: A limit is out of range.
    """
    for name, limit, usual in (
        ("time", time_limit, DEFAULT_TIME_LIMIT),
        ("storage", storage_limit, DEFAULT_STORAGE_LIMIT),
    ):
        if not 0 < limit <= _LONGEST:
            raise ConfigurationError(
                expected=f"a positive {name} limit of at most {_LONGEST:g} seconds",
                found=str(limit),
                remedy=f"Set {name}_limit to {usual:g}, say.",
            )
