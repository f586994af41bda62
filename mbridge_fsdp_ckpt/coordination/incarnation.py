# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Names that all ranks use alike, given by rank 0 once for each incarnation of the process group.

A store may outlive the ranks that met in it: torchrun hands the workers of a later rendezvous the store of an earlier
one, with all that was written there, and no number that a rank counts for itself is common to all (the agents of two
nodes may have counted different numbers of restarts).  So rank 0 draws a name, and hands it out on request alone:

    rank r     push [r, token] to the queue      wait for "answer/token"      push [r, name]
    rank 0     a thread answers each token, until all ranks have pushed its name

An answer to a token of one's own cannot be old.  Below the name nothing was written before, in whatever store it is
read; so jobs that are kept apart by prefixes stay apart for processes that see the store without them.

Sequences of meetings are numbered by rank 0, too: a rank that begins one waits until rank 0 has opened it, and reads
there what rank 0 has begun.  A rank that missed a call, or made one too many, meets the others again at its next call.
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
"""The number of earlier sequences of a kind whose keys are kept in the store when rank 0 opens another one."""

Kind = Literal["call", "async"]
"""A sequence's kind: "call" for calls in which ranks wait, "async" for asynchronous saves.  Each kind has its own
numbers."""


class Opened(NamedTuple):
    """A sequence of meetings that rank 0 has begun.

    Args:
        name: The name of the sequence, common to all ranks.
        number: The number of the sequence among those of its kind, from 1 on.
        purpose: What the sequence is for, and where: "save to /checkpoints/iter_0000010".
        note: An answer of rank 0 that all ranks read with the name, such as whether the save is skipped.
    """

    name: str
    number: int
    purpose: str
    note: str


class Incarnation:
    """One incarnation of the default process group: its name, its connections to the store, its sequences of meetings.

    Args:
        group: The default process group, which is not kept alive.

    Raises:
        ConfigurationError: The group's store is not a `TCPStore`, to which other processes of a rank can connect.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group_ref, self.rank, self.world_size = ref(group), dist.get_rank(), dist.get_world_size()
        entry = default_store()
        base = base_of(entry)
        self.host, self.port = base.host, base.port
        self._entry: dist.Store | None = entry  # kept no longer than until the name is known: rank 0's serves others
        self._name_lock = threading.Lock()
        self._name = ""
        self._connections_lock = threading.Lock()
        self._connections: dict[Kind, Connection] = {}
        self._sequences: dict[Kind, _Sequences] = {}
        self.question_keys: list[str] = []
        """Keys of the store under which `Participant.first_says` has asked, the oldest first; it deletes old ones."""

    def store(self, limit: float, kind: Kind) -> Store:
        """The store, without prefixes, over a connection that this process keeps.

        Args:
            limit: Seconds for each request.
            kind: The kind of sequence.  Each has its own connection, so that training does not wait while a thread of
                an asynchronous save waits in the store.
        """
        with self._connections_lock:
            known = self._connections.get(kind)
            if known is None or not known.usable:
                known = self._connections[kind] = connection(self.host, self.port, limit)
            return known.within(limit)

    def name(self, limit: float) -> str:
        """The name of this incarnation, common to all ranks.  Fetched once; any thread may call it.

        Args:
            limit: Seconds to wait for rank 0, and for each request.

        Raises:
            RankMissingError: Rank 0 has not named the incarnation within the time limit.
            DistError, OSError: The store does not answer.
        """
        with self._name_lock:
            if self._entry is not None:
                entry = Connection(self._entry.clone)  # type: ignore[attr-defined]  # the stubs lack it
                self._name = self._fetched_name(entry, limit) if self.rank else self._drawn(entry)
                self._entry = None
                self.store(limit, "call").set(f"{self._name}/hosts/{self.rank}", socket.gethostname())
            return self._name

    def join(self, kind: Kind, purpose: str, note: str, limits: tuple[float, float]) -> Opened:
        """Begin the next sequence of a kind together with rank 0.

        Args:
            kind: The kind of sequence.
            purpose: What this rank begins, and where.
            note: On rank 0, the answer that all ranks read with the name; elsewhere it is ignored.
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
        """Draw a new name, and start the thread that hands it out."""
        name = f"{_ROOT}/{uuid.uuid4().hex}"
        naming = _Naming(name, self.group_ref, set(range(1, self.world_size)), entry)
        threading.Thread(target=naming.serve, name="naming the job", daemon=True).start()
        return name

    def _fetched_name(self, entry: Connection, limit: float) -> str:
        """Ask rank 0 for the name that it has drawn."""
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
    """Rank 0's thread that hands the name out to all other ranks.

    Args:
        name: The name.
        group_ref: The process group that has the name.
        unaware: Ranks that have not confirmed the name yet.
        entry: A connection that only this thread uses.
    """

    name: str
    group_ref: ref[dist.ProcessGroup]
    unaware: set[int]
    entry: Connection

    def serve(self) -> None:
        """Answer until all ranks have confirmed the name.  Ranks of an earlier incarnation do not read their answers.

        It polls, and does not wait inside the store: torch aborts a program that ends meanwhile.
        """
        pause = _LOOKS[0]
        try:
            while self.unaware and self._is_last():
                answered = self.entry.ask(self._answer, _AMPLE)
                pause = _LOOKS[0] if answered else min(pause * _LONGER, _LOOKS[1])
                time.sleep(pause)
        except STORE_ERRORS as error:  # the ranks that wait for the name raise an error
            _log.info("rank 0 can no longer give its name to other ranks: %s", error)
        finally:
            self.entry.close()

    def _is_last(self) -> bool:
        """Whether no other group has followed.  A save in progress may need the name after its group was destroyed."""
        return dist.group.WORLD is None or dist.group.WORLD is self.group_ref()

    def _answer(self, store: Any) -> int:
        """Answer the questions in the queue; returns how many there were."""
        questions: int = min(store.queue_len(_QUEUE), _AT_ONCE)
        for _ in range(questions):
            question = store.queue_pop(_QUEUE, False)
            rank, token_or_name = json.loads(question)
            if not self._is_last():  # the next incarnation asks already
                store.queue_push(_QUEUE, question)
                break
            if token_or_name == self.name:
                self.unaware.discard(rank)
            elif "/" not in token_or_name:  # a token, not an earlier name
                store.set(f"{_ANSWERS}/{token_or_name}", self.name)
            if not self.unaware:
                break
        return questions


@dataclass(slots=True)
class _Sequences:
    """The sequences of one kind, as this rank knows them.

    Args:
        name: The name with which the names of all these sequences begin.
        kind: The kind.
        job: The incarnation that the sequences belong to.
    """

    name: str
    kind: Kind
    job: Incarnation
    _last: int = field(default=0)  # which this rank has joined, or passed over
    _unsure: list[Opened] = field(default_factory=list)  # of rank 0: the store has not answered, and may yet open them

    def open(self, purpose: str, note: str, limit: float) -> Opened:
        """Open the next sequence, on rank 0.

        Args:
            purpose: What the sequence is for, and where.
            note: The answer that all ranks read with the name.
            limit: Seconds for each request.
        """
        store, number = self.job.store(limit, self.kind), self._last + 1
        self._last = number
        opened = Opened(f"{self.name}/{number}", number, purpose, note)
        self._unsure.append(opened)
        for before in self._unsure[:-1]:
            end_without(store, before.name, _absent(repr(before.purpose), limit, 0))
        store.set(f"{self.name}/now", json.dumps(opened))  # first: who sees the other reads this
        store.set(f"{opened.name}/open", json.dumps(opened))
        self._unsure.clear()
        for word in ("open", "over"):  # a late rank may still read the last ones
            store.delete_key(f"{self.name}/{number - KEPT - 1}/{word}")
        return opened

    def join(self, purpose: str, time_limit: float, storage_limit: float) -> Opened:
        """Join the sequence that rank 0 has opened for the same purpose, on every other rank.

        Args:
            purpose: What this rank begins, and where.
            time_limit: See `Coordination`.
            storage_limit: See `Coordination`.
        """
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
        """The latest sequence, or the one after the last known if only that one is for the purpose.

        Returns:
            None if rank 0 has opened no new sequence after a while.
        """
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
            found=f"on rank 0: {found.purpose}, on rank {self.job.rank}: {purpose}",
            remedy="Call save and load in the same order and with the same directory on every rank.",
        )

    def _fail(
        self, store: Store, heartbeats: Heartbeats, found: Opened, error: CheckpointError, limit: float
    ) -> CheckpointError:
        """Fail a sequence that this rank does not join, on all ranks that have joined it; returns the common error."""
        rank, size, name = self.job.rank, self.job.world_size, f"{found.name}/1"
        begun = Arrival("beginning", error)
        met = Meeting(store, name, begun, rank, size, limit, heartbeats, lambda: None, hosts_of(name))
        answer = met.meet()
        met.leave()
        return CheckpointError.from_wire(answer["failed"]) if "failed" in answer else error


def end_without(store: Store, name: str, error: CheckpointError) -> None:
    """End a sequence that rank 0 has begun and could not attend: a rank that still joins it raises the error."""
    store.compare_set(f"{name}/1/{DECISION}", "", json.dumps({"failed": error.to_wire()}))
    store.set(f"{name}/over", "")


def hosts_of(name: str) -> str:
    """The key below which each rank writes its host, from the name of any sequence of the incarnation."""
    return "/".join([*name.split("/")[:2], "hosts"])


def _absent(what: str, limit: float, rank: int) -> RankMissingError:
    return RankMissingError(
        expected=f"rank 0 to begin {what} within {limit:g} s",
        found="no sign of rank 0",
        remedy="Rank 0 has failed, or this rank is one call ahead of it. Look at rank 0's log, and call save and load "
        "in the same order on every rank; raise the time limit if rank 0 was only slow.",
        rank=rank,
    )


_current: Incarnation | None = None
_finding = threading.Lock()


def incarnation() -> Incarnation:
    """The incarnation of the default process group, which has several ranks.  It makes no request to the store.

    Raises:
        ConfigurationError: The group's store is not a `TCPStore`, to which other processes of a rank can connect.
    """
    global _current
    with _finding:
        group = dist.group.WORLD
        assert group is not None
        if _current is None or _current.group_ref() is not group:
            _current = Incarnation(group)
        return _current


def _forget() -> None:
    """Forget the incarnation in a forked child: the connection is its parent's, and its thread does not exist here."""
    global _current, _finding
    _current, _finding = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def connection(host: str, port: int, limit: float) -> Connection:
    """A connection to a job's store, made by a thread of its own with the first request.

    Args:
        host: The host that serves the store.
        port: The port of the store there.
        limit: Seconds for the connection to be made.
    """
    return Connection(lambda: client(host, port, limit))


def client(host: str, port: int, limit: float) -> dist.TCPStore:
    """A client of a job's store.

    Args:
        host: The host that serves the store.
        port: The port of the store there.
        limit: Seconds for the connection to be made.
    """
    return dist.TCPStore(host, port, None, False, timedelta(seconds=limit), wait_for_workers=False)


def default_store() -> dist.Store:
    """The rendezvous store of the default process group (torch 2.13 `distributed_c10d._get_default_store`)."""
    from torch.distributed import distributed_c10d

    store: dist.Store = distributed_c10d._get_default_store()
    return store


def base_of(store: dist.Store) -> dist.TCPStore:
    """The store below all prefixes.

    Raises:
        ConfigurationError: It is not a `TCPStore`, which has what meetings need: waits with a limit, queues, and more
            than one connection.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        raise ConfigurationError(
            expected="a job of several ranks that met in a TCPStore (torchrun, init_method='env://' or 'tcp://')",
            found=type(store).__name__,
            remedy="Start the job with torchrun, or pass a TCPStore to init_process_group: other stores cannot tell "
            "which rank is late.",
        )
    return store
