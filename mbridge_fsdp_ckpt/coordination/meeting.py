# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""One meeting in the job's rendezvous store (`TCPStore` under torchrun): makes the requests that `protocol` asks for.

A rank that waits for the decision waits inside the store, which answers once it is there, so that it makes no requests
meanwhile.  The few ranks that gather messages poll instead, less and less often: they must also see a decision that
comes before the messages.

A wait holds this process's connection, so it is cut in slices.  These are long: one that ends without an answer leaves
two lines of torch's in the log, for which torch looks up the server's name (2.13 `socket.cpp`).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mbridge_fsdp_ckpt.coordination import protocol
from mbridge_fsdp_ckpt.coordination.connection import Store
from mbridge_fsdp_ckpt.coordination.heartbeat import STORE_ERRORS, Heartbeats, Watch
from mbridge_fsdp_ckpt.coordination.protocol import (
    FENCED,
    NAMES,
    OUTCOME,
    Combine,
    Drop,
    Gather,
    Late,
    Missing,
    Patience,
    Put,
    Read,
    Request,
    Settle,
    Steps,
    There,
)
from mbridge_fsdp_ckpt.coordination.rounds import Round, Wire, brought, combined, decided
from mbridge_fsdp_ckpt.errors import CheckpointError, ErrorData, RankMissingError, brief

GRACE = 15.0
"""Seconds for which ranks wait for the decision of rank 0 beyond the limit of the ranks that wait for messages."""

_LOOKS = 0.002, 0.25  # seconds between looks for messages, first and longest
_LONGER = 1.2  # factor of one pause to the next: a late message is seen at most a sixth of its delay later
_SLICE = 30.0  # seconds of one wait inside the store
_LAST_WORD = 5.0  # seconds that rank 0 waits until it is read
_RENEWED = 60.0  # seconds after which rank 0, while it waits, does what it does with each step

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Meeting:
    """All ranks meet once.

    Args:
        store: The store.
        name: The name of the meeting, common to all ranks and new for each meeting.
        round: The message of this rank, and how messages are combined and decided.
        rank: This rank.
        world_size: The number of ranks.
        time_limit: See `Coordination`.
        heartbeats: The heartbeats of all ranks.
        renew: Called on rank 0 about once a minute while it waits.
        hosts: The key below which each rank has written its host.
    """

    store: Store
    name: str
    round: Round[Any, Any]
    rank: int
    world_size: int
    time_limit: float
    heartbeats: Heartbeats
    renew: Callable[[], None]
    hosts: str
    _watch: Watch = field(init=False)
    _pause: float = field(default=_LOOKS[0])
    _renewed: float = field(init=False)

    def __post_init__(self) -> None:
        self._watch, self._renewed = Watch(self.heartbeats, self.time_limit), time.monotonic()

    def meet(self) -> Wire[Any]:
        """Bring this rank's message or error; returns the decision."""
        own = brought(self.round, self.rank)
        try:
            if "failed" in own:
                steps = protocol.fail(self._node, json.dumps(own))
            else:
                steps = protocol.attend(self._node, json.dumps(own["value"]))
            decision: Wire[Any] = json.loads(self._run(steps))
        except STORE_ERRORS as error:
            return {"failed": lost(error, self.round.phase, self.rank).to_wire()}
        return decision

    def fence(self) -> None:
        """Set the fence: from here on no rank gives up.

        Raises:
            CheckpointError: A rank has failed or given up before.
        """
        if self._answer(Settle(OUTCOME, FENCED)) != FENCED:
            decision = json.loads(self._run(protocol.follow(self._node)))
            raise CheckpointError.from_wire(decision["failed"])

    def was_fenced(self) -> bool:
        """Whether the meeting was fenced; True where the store does not answer, since it may have been."""
        try:
            return bool(self._answer(Read(OUTCOME, waits=False)) == FENCED)
        except STORE_ERRORS:
            return True  # nobody knows

    def leave(self) -> None:
        """Say that this rank has read the decision; rank 0 stays until the others have."""
        try:
            if self.rank == 0:
                wait_for(self.store, [self._at("left")], min(_LAST_WORD, self.time_limit))
            elif self.store.add(self._at("read"), 1) == self.world_size - 1:
                self.store.set(self._at("left"), "")
        except STORE_ERRORS as error:  # the decision is known here, and that is all that counts
            _log.info("rank %d could not tell rank 0 that it has read the decision: %s", self.rank, error)

    def keys(self, *, failed: bool) -> list[str]:
        """The keys of this meeting that stay in the store when it is over, and that this rank deletes later.

        Args:
            failed: Whether the meeting failed.  If not, the ranks that gathered messages have deleted their keys.
        """
        common = (protocol.DECISION, OUTCOME, protocol.NAMED, "read", "left") if self.rank == 0 else ()
        own = (protocol.message_of(self.rank), protocol.here(self.rank)) if failed else ()
        return [self._at(key) for key in (*common, *own)]

    @property
    def _node(self) -> protocol.Node:
        return protocol.Node(self.rank, self.world_size)

    def _at(self, key: str) -> str:
        return f"{self.name}/{key}"

    def _run(self, steps: Steps) -> str:
        """Make all requests of the protocol; returns the decision."""
        answer: Any = None
        while True:
            try:
                request = steps.send(answer)
            except StopIteration as stop:
                return str(stop.value)
            if not isinstance(request, Combine):
                answer = self._answer(request)
                continue
            wire = self._think(request)
            if request.decides:
                answer = json.dumps(wire)
            elif "failed" in wire:
                steps, answer = protocol.fail(self._node, json.dumps(wire)), None
            else:
                answer = json.dumps(wire["value"])

    def _think(self, request: Combine) -> Wire[Any]:
        messages = [json.loads(message) for message in request.messages]
        with self.heartbeats.at_work():
            whole = combined(self.round, messages, self.rank)
            return decided(self.round, whole) if request.decides else whole

    def _answer(self, request: Request) -> Any:
        match request:
            case Put(key, value):
                self.store.set(self._at(key), value)
            case Settle(key, value):
                return self.store.compare_set(self._at(key), "", value).decode()
            case Gather(keys):
                return self._look([self._at(key) for key in keys])
            case Read(key, waits):
                return self._read(self._at(key), waits=waits)
            case There(key):
                return self.store.check([self._at(key)])
            case Drop(keys):
                for key in keys:
                    self.store.delete_key(self._at(key))
            case Patience(for_messages):
                self._watch = Watch(self.heartbeats, self.time_limit + (0.0 if for_messages else GRACE))
            case Late():
                return self._watch.over()
            case Missing(absent, fenced):
                return json.dumps({"failed": self._missing(absent, fenced=fenced)})
        return None

    def _look(self, keys: list[str]) -> list[str] | None:
        """The values of all keys; None, after a pause, if a key is missing."""
        if self.store.check(keys):
            return values(self.store, keys)
        time.sleep(self._pause)
        self._pause = min(self._pause * _LONGER, _LOOKS[1], self.time_limit / 8)
        if self.rank == 0 and time.monotonic() - self._renewed > _RENEWED:
            self._renewed = time.monotonic()
            with self.heartbeats.at_work():
                self.renew()
        return None

    def _read(self, key: str, *, waits: bool) -> str | None:
        is_there = wait_for(self.store, [key], a_while(self.time_limit)) if waits else self.store.check([key])
        return self.store.get(key).decode() if is_there else None

    def _missing(self, absent: tuple[int, ...], *, fenced: bool) -> ErrorData:
        named = ", ".join(map(self._with_host, absent[:NAMES])) + (", ..." if len(absent) > NAMES else "")
        stalled = fenced or (absent == (0,) and self._answer(There(protocol.here(0))))
        remedy = "Look at the logs of these ranks, and raise the time limit if they were only slow."
        return RankMissingError(
            expected=f"all {self.world_size} ranks at {self.round.phase!r} within {self.time_limit:g} s",
            found=f"no {'decision' if stalled else 'sign'} of rank {named}",
            remedy=f"Rank 0 was about to commit: check whether the checkpoint is in its place. {remedy}"
            if fenced
            else remedy,
        ).to_wire()

    def _with_host(self, rank: int) -> str:
        key = f"{self.hosts}/{rank}"
        return f"{rank} on {self.store.get(key).decode()}" if self.store.check([key]) else str(rank)


def a_while(time_limit: float) -> float:
    """Seconds of one wait inside the store, after which a rank looks for heartbeats."""
    return min(_SLICE, time_limit / 8)


def wait_for(store: Store, keys: list[str], seconds: float) -> bool:
    """Wait inside the store; returns whether all keys are there."""
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except dist.DistStoreError:  # late; a store that has gone raises another
        return False
    return True


def values(store: Store, keys: list[str]) -> list[str]:
    """The values of keys that are there, in one request where the store supports it."""
    in_one = getattr(store, "has_extended_api", bool)()  # torch's types don't know it
    return [found.decode() for found in (store.multi_get(keys) if in_one else map(store.get, keys))]


def lost(error: BaseException, phase: str, rank: int) -> RankMissingError:
    """The error for a store that does not answer any more."""
    frozen = isinstance(error, TimeoutError)
    return RankMissingError(
        expected=f"the job's rendezvous store to answer at {phase!r}",
        found=brief(error),
        remedy="The process that serves the store (rank 0, or torchrun's agent) "
        f"{'is stopped or out of reach: look at its host' if frozen else 'has ended: look at its log'}.",
        rank=rank,
    )
