# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What all ranks call alike: names that rank 0 gives, once for each incarnation of the process group.

A store may outlive the ranks that met in it: torchrun hands the workers of a later rendezvous the store of an earlier
one, with all that was written there, and no number that a rank counts for itself is common to all (the agents of two
nodes may have counted different numbers of restarts).  So rank 0 draws a name, and hands it out on request alone:

    rank r     push [r, token] to the queue      wait for "answer/token"      push [r, name]
    rank 0     a thread answers each token, until all ranks have pushed its name

An answer to a token of one's own cannot be old.  Below the name nothing was written before, in whatever store it is
read; so jobs that are kept apart by prefixes stay apart for processes that see the store without them.

Sequences of meetings are numbered by rank 0, too: who begins one waits until rank 0 has opened it, and finds there what
rank 0 has begun.  A rank that missed a call, or made one too many, is so at the next one where the others are.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, NamedTuple
from weakref import ref

import torch.distributed as dist

from mbridge_fsdp_ckpt.coordination import meeting
from mbridge_fsdp_ckpt.coordination.connection import Connection, Store
from mbridge_fsdp_ckpt.coordination.heartbeat import STORE_ERRORS, Heartbeats, Watch
from mbridge_fsdp_ckpt.coordination.meeting import Meeting, a_while, wait_for
from mbridge_fsdp_ckpt.coordination.protocol import DECISION
from mbridge_fsdp_ckpt.coordination.rounds import Arrival
from mbridge_fsdp_ckpt.errors import CheckpointError, ConfigurationError, RankMissingError

_ROOT = "mbridge_fsdp_ckpt"
_QUEUE = f"{_ROOT}/asked"
_ANSWERS = f"{_ROOT}/answers"
_LOOKS, _LONGER = (0.002, 0.25), 1.2  # seconds between looks for questions, first and longest, and how they grow
_AT_ONCE, _AMPLE = 256, 90.0  # questions answered in one request, and the seconds that these may take
_SECOND_THOUGHT = 15.0  # seconds that a rank which began something else waits for the others to begin the same
_log = logging.getLogger(__name__)

KEPT = 2
"""Sequences of a kind of which the keys are still there when rank 0 opens another."""

Kind = Literal["call", "async"]
"""Sequences of calls that ranks wait in, and of saves that go on asynchronously, are numbered separately."""


class Opened(NamedTuple):
    """A sequence that rank 0 has begun.

    Args:
        name: Of the sequence, for all ranks.
        number: Of its kind, from 1 on.
        purpose: What for, and where.
        note: What else rank 0 says of it.
    """

    name: str
    number: int
    purpose: str
    note: str


class Incarnation:
    """One incarnation of the default process group, as far as its ranks meet.

    Args:
        group: The group.

    Raises:
        ConfigurationError: Its store is none that every rank, and other processes of it, can connect to.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.world_size = ref(group), dist.get_rank(), dist.get_world_size()
        entry = default_store()
        base = base_of(entry)
        self.host, self.port = base.host, base.port
        self._entry: dist.Store | None = entry  # kept no longer than until the name is known: rank 0's serves others
        self._naming = threading.Lock()
        self._name = ""
        self._connecting = threading.Lock()
        self._connections: dict[Kind, Connection] = {}
        self._sequences: dict[Kind, _Sequences] = {}
        self.asked: list[str] = []
        """Keys of questions about saves, the oldest first: see `elsewhere`."""

    def store(self, limit: float, kind: Kind) -> Store:
        """The store, without prefixes, over a connection that this process keeps.

        Args:
            limit: Seconds for each request.
            kind: Whose connection: who trains on must not wait while another thread waits in the store.
        """
        with self._connecting:
            known = self._connections.get(kind)
            if known is None or not known.usable:
                known = self._connections[kind] = connection(self.host, self.port, limit)
            return known.within(limit)

    def name(self, limit: float) -> str:
        """What all ranks call this incarnation; asked once, of any thread.

        Raises:
            RankMissingError: Rank 0 has not named the incarnation within the time limit.
            DistError, OSError: The store does not answer.
        """
        with self._naming:
            if self._entry is not None:
                entry = Connection(self._entry.clone)  # type: ignore[attr-defined]  # the stubs lack it
                self._name = self._fetched_name(entry, limit) if self.rank else self._drawn(entry)
                self._entry = None
                self.store(limit, "call").set(f"{self._name}/hosts/{self.rank}", socket.gethostname())
            return self._name

    def join(self, kind: Kind, purpose: str, note: str, limits: tuple[float, float]) -> Opened:
        """Begin the next sequence of a kind, as rank 0 does.

        Args:
            kind: See `Kind`.
            purpose: What this rank begins, and where.
            note: See `Opened`, of rank 0.
            limits: `Coordination.time_limit` and `Coordination.storage_limit`.

        Raises:
            ConfigurationError: The ranks begin different things.
            RankMissingError: Rank 0 has not begun within the limit.
            DistError, OSError: The store does not answer.
        """
        name = f"{self.name(limits[0])}/{kind}"
        known = self._sequences.setdefault(kind, _Sequences(name, kind, self))
        return known.open(purpose, note, limits[0]) if self.rank == 0 else known.join(purpose, *limits)

    def _drawn(self, entry: Connection) -> str:
        """A new name, and the thread that hands it out."""
        name = f"{_ROOT}/{uuid.uuid4().hex}"
        naming = _Naming(name, self.group, set(range(1, self.world_size)), entry)
        threading.Thread(target=naming.serve, name="naming the job", daemon=True).start()
        return name

    def _fetched_name(self, entry: Connection, limit: float) -> str:
        """The name that rank 0 has drawn."""
        store, token = entry.within(limit), uuid.uuid4().hex
        answer, watch = f"{_ANSWERS}/{token}", Watch(Heartbeats(None, "", limit, limit, 1), limit)
        try:
            store.queue_push(_QUEUE, json.dumps([self.rank, token]))
            while not wait_for(store, [answer], a_while(limit)):
                if watch.over():
                    raise _absent("its first save or load", limit, self.rank)
            name = store.get(answer).decode()
            store.delete_key(answer)
            store.queue_push(_QUEUE, json.dumps([self.rank, name]))
        finally:
            entry.close()
        return name


@dataclass(slots=True)
class _Naming:
    """Rank 0's thread that tells all others the name.

    Args:
        name: The name.
        group: The process group that it is of.
        unaware: Ranks that have not said that they know it.
        entry: A connection that nobody else uses.
    """

    name: str
    group: ref[dist.ProcessGroup]
    unaware: set[int]
    entry: Connection

    def serve(self) -> None:
        """Answer until everybody knows; what ranks of an earlier incarnation have asked nobody reads.

        It looks, and does not wait inside the store: torch aborts a program that ends meanwhile.
        """
        pause = _LOOKS[0]
        try:
            while self.unaware and self._is_last():
                answered = self.entry.ask(self._answer, _AMPLE)
                pause = _LOOKS[0] if answered else min(pause * _LONGER, _LOOKS[1])
                time.sleep(pause)
        except STORE_ERRORS as error:  # who waits for the name will say so
            _log.info("rank 0 cannot tell the name of the job any more: %s", error)
        finally:
            self.entry.close()

    def _is_last(self) -> bool:
        """Whether no other group has followed: a save that goes on may need the name after its group was left."""
        return dist.group.WORLD is None or dist.group.WORLD is self.group()

    def _answer(self, store: Any) -> int:
        """Answer what has been asked; how much that was."""
        asked_now: int = min(store.queue_len(_QUEUE), _AT_ONCE)
        for _ in range(asked_now):
            asked = store.queue_pop(_QUEUE, False)
            rank, said = json.loads(asked)
            if not self._is_last():  # the next incarnation asks already
                store.queue_push(_QUEUE, asked)
                break
            if said == self.name:
                self.unaware.discard(rank)
            elif "/" not in said:  # a token, not an earlier name
                store.set(f"{_ANSWERS}/{said}", self.name)
            if not self.unaware:
                break
        return asked_now


@dataclass(slots=True)
class _Sequences:
    """The sequences of one kind, as far as this rank knows.

    Args:
        name: Of all of them.
        kind: The kind.
        job: Whose.
    """

    name: str
    kind: Kind
    job: Incarnation
    _last: int = field(default=0)  # which this rank has joined, or passed over
    _unsure: list[Opened] = field(default_factory=list)  # of rank 0: the store has not answered, and may yet open them

    def open(self, purpose: str, note: str, limit: float) -> Opened:
        """Of rank 0: the next one."""
        store, number = self.job.store(limit, self.kind), self._last + 1
        self._last = number
        opened = Opened(f"{self.name}/{number}", number, purpose, note)
        self._unsure.append(opened)
        for before in self._unsure[:-1]:
            end_without(store, before.name, _absent(repr(before.purpose), limit, 0))
        store.set(f"{self.name}/now", json.dumps(opened))  # first: who sees the other reads this
        store.set(f"{opened.name}/open", json.dumps(opened))
        self._unsure.clear()
        for word in ("open", "over"):  # who is late may still read the last ones
            store.delete_key(f"{self.name}/{number - KEPT - 1}/{word}")
        return opened

    def join(self, purpose: str, time_limit: float, storage_limit: float) -> Opened:
        """Of all others: the one that rank 0 has opened for the same purpose."""
        store = self.job.store(time_limit, self.kind)
        heartbeats = Heartbeats(store, f"{self.name}/0", time_limit, storage_limit, self.job.world_size)
        watch = Watch(heartbeats, time_limit + meeting.GRACE)
        differs: CheckpointError | None = None
        while True:
            found = self._next(store, purpose, time_limit)
            if found is not None and found.purpose == purpose:
                self._last = found.number
                return found
            if found is not None and differs is not None:
                raise differs  # which this rank may yet join, with its next call
            if found is not None:
                self._last = found.number
                if not store.check([f"{found.name}/over"]):
                    differs = self._fail(store, heartbeats, found, self._differs(found, purpose), time_limit)
                    watch = Watch(Heartbeats(None, "", 1.0, 1.0, 1), min(_SECOND_THOUGHT, 2 * time_limit))
            elif watch.over():
                raise differs or _absent(repr(purpose), time_limit, self.job.rank)

    def _next(self, store: Store, purpose: str, limit: float) -> Opened | None:
        """The latest sequence, or the one after the last known if that alone is for the purpose; None after a while."""
        following, now = f"{self.name}/{self._last + 1}/open", f"{self.name}/now"
        there = wait_for(store, [following], a_while(limit))
        if not there and not store.check([now]):
            return None
        latest = Opened(*json.loads(store.get(now)))
        if latest.number <= self._last:
            return None
        if there and latest.purpose != purpose and latest.number > self._last + 1:
            missed = Opened(*json.loads(store.get(following)))
            return missed if missed.purpose == purpose else latest
        return latest

    def _differs(self, found: Opened, purpose: str) -> ConfigurationError:
        return ConfigurationError(
            expected="all ranks to begin the same save or load",
            found=f"rank 0: {found.purpose}, rank {self.job.rank}: {purpose}",
            remedy="Call save and load in the same order and with the same directory on every rank.",
        )

    def _fail(
        self, store: Store, heartbeats: Heartbeats, found: Opened, error: CheckpointError, limit: float
    ) -> CheckpointError:
        """Let a sequence that this rank will not join fail on all that have; returns what it failed with."""
        rank, size, name = self.job.rank, self.job.world_size, f"{found.name}/1"
        begun = Arrival("beginning", error)
        met = Meeting(store, name, begun, rank, size, limit, heartbeats, lambda: None, hosts_of(name))
        answer = met.meet()
        met.leave()
        return CheckpointError.from_wire(answer["failed"]) if "failed" in answer else error


def end_without(store: Store, name: str, error: CheckpointError) -> None:
    """End a sequence that rank 0 has begun and could not attend: whoever still joins it hears why."""
    store.compare_set(f"{name}/1/{DECISION}", "", json.dumps({"failed": error.to_wire()}))
    store.set(f"{name}/over", "")


def hosts_of(name: str) -> str:
    """Where ranks write what host they are on: below the name of the incarnation, with which all others begin."""
    return "/".join([*name.split("/")[:2], "hosts"])


def _absent(what: str, limit: float, rank: int) -> RankMissingError:
    return RankMissingError(
        expected=f"rank 0 to begin {what} within {limit:g} s",
        found="no sign of rank 0",
        remedy="Has it failed, or is this rank one call ahead of it? Look at rank 0's log, and call save and load in "
        "the same order on every rank; raise the time limit if it was only slow.",
        rank=rank,
    )


_current: Incarnation | None = None
_finding = threading.Lock()


def incarnation() -> Incarnation:
    """That of the default process group, which has several ranks.  No request.

    Raises:
        ConfigurationError: See `Incarnation`.
    """
    global _current
    with _finding:
        group = dist.group.WORLD
        assert group is not None
        if _current is None or _current.group() is not group:
            _current = Incarnation(group)
        return _current


def _forget() -> None:
    """In a forked child: the connection is its parent's, and the thread that serves it is not there."""
    global _current, _finding
    _current, _finding = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def connection(host: str, port: int, limit: float) -> Connection:
    """A connection to a job's store; see `client`."""
    return Connection(lambda: client(host, port, limit))


def client(host: str, port: int, limit: float) -> dist.TCPStore:
    """A client of a job's store.

    Args:
        host: Who serves it.
        port: And where.
        limit: Seconds for the connection to be made.
    """
    return dist.TCPStore(host, port, None, False, timedelta(seconds=limit), wait_for_workers=False)


def default_store() -> dist.Store:
    """The rendezvous store of the default process group (torch 2.13 `distributed_c10d._get_default_store`)."""
    from torch.distributed import distributed_c10d

    store: dist.Store = distributed_c10d._get_default_store()
    return store


def base_of(store: dist.Store) -> dist.TCPStore:
    """A store below all prefixes.

    Raises:
        ConfigurationError: It is none that keeps what meetings need: waits with a limit, queues, other connections.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        raise ConfigurationError(
            expected="a job of several ranks that met in a TCPStore (torchrun, init_method='env://' or 'tcp://')",
            found=type(store).__name__,
            remedy="Start it with torchrun, or pass init_process_group a TCPStore: the others cannot tell who is late.",
        )
    return store
