# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The one exchange between ranks: all bring a message, these are combined, one decides, all get the same decision.

No collective.  Ranks meet in the job's rendezvous store, where waiting has a time limit and missing ranks can be named
by name (`meeting`).  A collective has neither: a rank that raised before it leaves the others waiting until a watchdog
ends the job.

Rank 0 names each sequence, and says what it begins (`incarnation`): whoever begins something else fails, and with it
all.  Rank 0 serves the store in many jobs: after the last word of a sequence it stays a little, until everyone has
read it.

Cost: a constant number of store requests a rank, however many ranks there are.  Messages are combined on a tree
(`protocol`), bounded by who combines them: nobody handles one of every rank.
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
"""Keys of the last sequences of a kind, of each rank that this process attends for; see `Coordination._tidy`."""
_LONGEST = 1e9  # seconds
_unended: list[tuple[str, CheckpointError]] = []
"""Sequences that rank 0 attended here until the store no longer answered, and what it raised."""


@dataclass(slots=True)
class Coordination:
    """A sequence of meetings of all ranks.

    Args:
        name: Common to all ranks and new for each sequence; see `next_coordination`.
        rank: This rank.
        world_size: All ranks.
        time_limit: Seconds that a rank waits for the others at each meeting, counted from its own arrival or from
            the last heartbeat of any other rank.
        store: The store they meet in; None with a single rank.
        storage_limit: Seconds that a rank may be inside one call of the storage, without a step of its own.
        on_heartbeat: Called with every step, in the thread that works.
        owned: The connection behind the store, where it is this coordination's alone.
        keys: What this rank wrote and is to delete once nobody reads it any more.
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
        """This rank, if it leads a group, where the messages of the group meet: each rank is in one; see `protocol`."""
        return self.rank if Node(self.rank, self.world_size).leads else None

    def meet[M, V](self, round: Round[M, V]) -> V:
        """Meet all ranks; get what rank 0 decides.

        Raises:
            CheckpointError: The same on every rank: what a rank brought or a function of the round raised, or
                `RankMissingError` naming the ranks that did not arrive.
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
        """After the last meeting: rank 0 stays until the others have read the decision.  An error is a last word too.

        Returns:
            Whether the store has heard of it.
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
            _log.info("rank %d does not hear the end of %s: %s", self.rank, self.name, error)
            return False
        return True

    def make_up(self) -> None:
        """Of rank 0, before the first meeting: end what it could not end when the store did not answer.

        Raises:
            DistError, OSError: It does not answer now.
        """
        while self.rank == 0 and self.store is not None and _unended:
            end_without(self.store, *_unended[-1])
            _unended.pop()

    def _tidy(self, store: Store) -> None:
        """Delete this rank's keys of an earlier sequence.  Those of the last ones are kept: who is late reads them."""
        spent = _spent.setdefault((self.name.rpartition("/")[0], self.rank), deque())
        spent.append(self.keys)
        while len(spent) > KEPT:
            for key in spent.popleft():
                store.delete_key(key)

    def close(self) -> None:
        """After all meetings: let go of a connection of its own, and of what refers to this."""
        self.on_heartbeat, self._last = lambda: None, None
        if self.owned is not None:
            self.owned.close()

    @contextmanager
    def another_connection(self) -> Iterator[Store]:
        """The job's store over another connection, while the block runs: for what waits inside it."""
        job = incarnation()
        own = connection(job.host, job.port, self.time_limit)
        try:
            yield own.within(self.time_limit)
        finally:
            own.close()

    def fence(self) -> None:
        """Before the coordinator does what cannot be undone: from here on the others wait for it.

        Raises:
            CheckpointError: What the others raised, if they gave up meanwhile.
        """
        if self._last is not None:
            self._last.fence()
        self._fenced = True

    def was_fenced(self) -> bool:
        """Whether the last meeting was fenced, as far as this rank can tell: what it was about may be done."""
        return self._fenced or (self._last is not None and self._last.was_fenced())

    @property
    def has_stopped(self) -> bool:
        """Whether this rank is stuck in its storage; of another thread."""
        return self._heartbeats.has_stopped

    def heartbeat(self) -> None:
        """After each step of long work: others waiting for this rank begin their limit anew.  Cheap to call."""
        self.on_heartbeat()
        self._heartbeats.give()

    def watch(self) -> Watch:
        """For a wait outside a meeting: tells when the time limit has passed without a heartbeat of any rank."""
        return Watch(self._heartbeats, self.time_limit)

    def at_work(self) -> AbstractContextManager[None]:
        """Around all that touches storage between meetings, on any rank: a call that takes long is no silence.

            with coordination.at_work():
                for item in items:
                    write(item)         # may block for up to the storage limit
                    coordination.heartbeat()    # a step is done: that limit, too, begins anew

        The coordinator is inside one already, and blocks may be nested.  Leave out what waits for other ranks, or for
        nothing of the storage's: who is stuck there is to be named within the time limit.
        """
        return self._heartbeats.at_work()


def next_coordination(
    purpose: str, time_limit: float = DEFAULT_TIME_LIMIT, storage_limit: float = DEFAULT_STORAGE_LIMIT
) -> Coordination:
    """The next sequence of meetings of all ranks of this job.  Every rank calls it once a save or load, first thing.

    Args:
        purpose: What for, and where: "save to /checkpoints/iter_0000010".
        time_limit: See `Coordination`.
        storage_limit: See `Coordination`.

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
    """Refuse limits that cannot be meant.

    Raises:
        ConfigurationError: One is not positive, or longer than threads and stores can wait.
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
