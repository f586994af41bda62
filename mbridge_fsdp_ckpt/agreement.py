"""The one exchange between ranks: all arrive with a message, one judges, all get the same verdict.

No collective.  Ranks meet in the job's rendezvous store (`TCPStore` under torchrun), where waiting has a time limit
and who is missing can be told by name.  A collective has neither: a rank that raised before it leaves the others
waiting until a watchdog ends the job.

    rank r                                   judge (rank 0)
      set  <meeting>/<r> = message             wait until all arrived, one failed, or the limit is over
      wait <meeting>/verdict                   set <meeting>/verdict = answer, or the error for everyone

Who waits in vain writes its error to <meeting>/outcome, once for all: whoever comes later raises the same.  A judge
about to do what cannot be undone seals the meeting there first; from then on nobody gives up before the verdict.

Cost: a constant number of store requests a rank, messages bounded by the caller, one reader.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from mbridge_fsdp_ckpt.errors import (
    CheckpointError,
    ConfigurationError,
    InternalError,
    RankMissingError,
    brief,
    describe_unexpected,
)

DEFAULT_TIME_LIMIT = 120.0  # seconds
_GRACE = 15.0  # seconds that others wait for the judge's verdict beyond the limit it waited itself
_POLL = 0.005, 0.2  # seconds between looks, first and longest
_MISSING_NAMED = 32
_MAX_BYTES = 6 << 20  # the store closes the connection of who sends 8 MiB

_SEALED = "sealed"
_HOSTS = "mbridge_fsdp_ckpt/hosts"

Judge = Callable[[list[Any]], Any]


@dataclass(slots=True)
class Agreement:
    """A sequence of meetings of all ranks.

    Args:
        name: Common to all ranks and new for each sequence; see `next_agreement`.
        rank: This rank.
        world_size: All ranks.
        time_limit: Seconds that a rank waits for the others at each meeting, counted from its own arrival or from
            the last sign of life of any other rank.
        store: The store they meet in; None with a single rank.
        on_beat: Called with every sign of life.
    """

    name: str
    rank: int
    world_size: int
    time_limit: float
    store: Any = None
    on_beat: Callable[[], None] = lambda: None
    _meetings: int = field(default=0)
    _last_beat: float = field(default=0.0)
    _sealed: bool = field(default=False)

    def meet(self, phase: str, message: Any, judge: Judge) -> Any:
        """Bring a message; get what `judge`, called on rank 0 with all messages by rank, returns.

        Args:
            phase: What this meeting is for, in errors.
            message: JSON-able and bounded, or a `CheckpointError` that this rank failed with.
            judge: Raises a `CheckpointError` to fail everyone alike.

        Raises:
            CheckpointError: The same on every rank: what a rank brought or the judge raised, or `RankMissingError`
                naming the ranks that did not arrive.
        """
        self._meetings, self._sealed = self._meetings + 1, False
        wire = _to_wire(message, phase, self.rank)
        if self.store is None:
            verdict = _judged([wire], judge, phase)
        else:
            verdict = self._meet_in_store(f"{self.name}/{self._meetings}", phase, wire, judge)
        if "failed" in verdict:
            raise CheckpointError.from_wire(verdict["failed"])
        return verdict["answer"]

    def seal(self) -> None:
        """Before a judge does what cannot be undone: from here on the others wait for it.

        Raises:
            CheckpointError: What the others raised, if they gave up meanwhile.
        """
        if self.store is not None:
            outcome = self._settle(f"{self.name}/{self._meetings}", _SEALED)
            if outcome != _SEALED:
                raise CheckpointError.from_wire(json.loads(outcome))
        self._sealed = True

    def was_sealed(self) -> bool:
        """Whether the last meeting was sealed, as far as this rank can tell: what it was about may be done."""
        if self._sealed or self.store is None:
            return self._sealed
        try:
            return self._outcome(f"{self.name}/{self._meetings}") == _SEALED
        except (dist.DistError, ConnectionError, OSError):
            return True  # nobody knows

    def _settle(self, prefix: str, outcome: str) -> str:
        """Write the meeting's outcome unless there is one; returns the one that holds."""
        held: bytes = self.store.compare_set(f"{prefix}/outcome", "", outcome)
        return held.decode()

    def _outcome(self, prefix: str) -> str:
        """What holds so far; empty where nothing does."""
        key = f"{prefix}/outcome"
        return str(self.store.get(key).decode()) if self.store.check([key]) else ""

    def beat(self) -> None:
        """A sign of life during long work: others waiting for this rank begin their limit anew.  Cheap to call."""
        self.on_beat()
        now = time.monotonic()
        if self.store is not None and now - self._last_beat > min(5.0, self.time_limit / 8):
            self._last_beat = now
            self.store.add(f"{self.name}/beats", 1)

    def _meet_in_store(self, prefix: str, phase: str, wire: dict[str, Any], judge: Judge) -> dict[str, Any]:
        try:
            self._arrive(prefix, wire)
            return self._lead(prefix, phase, judge) if self.rank == 0 else self._follow(prefix, phase)
        except (dist.DistError, ConnectionError, OSError) as error:
            lost = RankMissingError(
                expected=f"the job's rendezvous store to answer at {phase!r}",
                found=brief(error),
                remedy="Rank 0, or the process that serves the store, has ended: look at its log.",
                rank=self.rank,
            )
            return {"failed": lost.to_wire()}

    def _arrive(self, prefix: str, wire: dict[str, Any]) -> None:
        self.store.set(f"{prefix}/{self.rank}", json.dumps(wire))
        if "failed" in wire:
            self.store.set(f"{prefix}/failed", str(self.rank))
        self.store.add(f"{prefix}/arrived", 1)

    def _lead(self, prefix: str, phase: str, judge: Judge) -> dict[str, Any]:
        """Rank 0: collect, judge, publish.  An early failure does not wait for the rest."""
        watch = _Watch(self)
        while int(self.store.add(f"{prefix}/arrived", 0)) < self.world_size:
            if self.store.check([f"{prefix}/failed"]):
                failed = int(self.store.get(f"{prefix}/failed"))
                return self._publish(prefix, json.loads(self.store.get(f"{prefix}/{failed}")))
            if watch.over():
                return self._publish(prefix, {"failed": json.loads(self._give_up(prefix, phase))})
        wires = [json.loads(self.store.get(f"{prefix}/{rank}")) for rank in range(self.world_size)]
        verdict = _judged(wires, judge, phase)
        outcome = self._settle(prefix, _SEALED)
        return self._publish(prefix, verdict if outcome == _SEALED else {"failed": json.loads(outcome)})

    def _follow(self, prefix: str, phase: str) -> dict[str, Any]:
        watch, sealed = _Watch(self, grace=_GRACE), False
        while not self.store.check([f"{prefix}/verdict"]):
            outcome = self._outcome(prefix)
            if not outcome and watch.over():
                outcome = self._give_up(prefix, phase)
            if outcome == _SEALED and not sealed:
                watch, sealed = _Watch(self, grace=_GRACE), True
            elif outcome and outcome != _SEALED:
                return {"failed": json.loads(outcome)}
            if sealed and watch.over():
                return {"failed": self._missing(prefix, phase, sealed=True).to_wire()}
        verdict: dict[str, Any] = json.loads(self.store.get(f"{prefix}/verdict"))
        return verdict

    def _give_up(self, prefix: str, phase: str) -> str:
        return self._settle(prefix, json.dumps(self._missing(prefix, phase).to_wire()))

    def _publish(self, prefix: str, verdict: dict[str, Any]) -> dict[str, Any]:
        self.store.set(f"{prefix}/verdict", json.dumps(verdict))
        for rank in range(self.world_size):
            self.store.delete_key(f"{prefix}/{rank}")
        return verdict

    def _missing(self, prefix: str, phase: str, *, sealed: bool = False) -> CheckpointError:
        absent = [rank for rank in range(self.world_size) if not self.store.check([f"{prefix}/{rank}"])]
        named = ", ".join(map(self._with_host, absent[:_MISSING_NAMED]))
        named += ", ..." if len(absent) > _MISSING_NAMED else ""
        remedy = "Look at the logs of these ranks; raise the time limit if they were only slow."
        return RankMissingError(
            expected=f"all {self.world_size} ranks at {phase!r} within {self.time_limit:g} s",
            found=f"no sign of rank {named}" if absent and not sealed else f"no verdict of rank {self._with_host(0)}",
            remedy=f"It was about to finish: look whether the checkpoint is there. {remedy}" if sealed else remedy,
        )

    def _with_host(self, rank: int) -> str:
        key = f"{_HOSTS}/{rank}"
        return f"{rank} on {self.store.get(key).decode()}" if self.store.check([key]) else str(rank)


class _Watch:
    """Time since the start or since the last sign of life of any rank."""

    def __init__(self, agreement: Agreement, grace: float = 0.0) -> None:
        self._agreement, self._limit = agreement, agreement.time_limit + grace
        self._pause, longest = _POLL
        self._longest = min(longest, max(_POLL[0], agreement.time_limit / 10))
        self._since, self._beats = time.monotonic(), -1
        self._next_look = self._since

    def over(self) -> bool:
        """Sleep a little; whether the limit has passed."""
        time.sleep(self._pause)
        self._pause = min(self._pause * 1.5, self._longest)
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + 1.0
            beats = int(self._agreement.store.add(f"{self._agreement.name}/beats", 0))
            if beats != self._beats:
                self._beats, self._since = beats, now
        return now - self._since > self._limit


def _to_wire(message: Any, phase: str, rank: int) -> dict[str, Any]:
    if isinstance(message, CheckpointError):
        return {"failed": message.to_wire()}
    return _checked({"message": message}, phase, rank)


def _checked(wire: dict[str, Any], phase: str, rank: int) -> dict[str, Any]:
    """The data, or an error in its place where the store cannot carry it."""
    try:
        size = len(json.dumps(wire))
    except (TypeError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
    else:
        if size <= _MAX_BYTES:
            return wire
        found = f"{size} bytes"
    failure = InternalError(
        expected=f"a JSON message of at most {_MAX_BYTES} bytes at {phase!r}",
        found=found,
        remedy="This is a defect of the caller: what ranks exchange must be bounded data.",
        rank=rank,
    )
    return {"failed": failure.to_wire()}


def _judged(wires: list[dict[str, Any]], judge: Judge, phase: str) -> dict[str, Any]:
    for wire in wires:
        if "failed" in wire:
            return wire
    try:
        return _checked({"answer": judge([wire["message"] for wire in wires])}, phase, 0)
    except CheckpointError as error:
        return {"failed": error.to_wire()}
    except Exception as error:
        return {"failed": describe_unexpected(error, rank=0, doing=phase).to_wire()}


def next_agreement(purpose: str, time_limit: float = DEFAULT_TIME_LIMIT) -> Agreement:
    """The next sequence of meetings of all ranks of this job.  Every rank calls it once a save or load, first thing.

    Raises:
        ConfigurationError: The time limit is not positive.
    """
    if not time_limit > 0:
        raise ConfigurationError(
            expected="a positive time limit in seconds", found=str(time_limit), remedy="Set time_limit to 120, say."
        )
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Agreement(purpose, 0, 1, time_limit)
    store, rank = _default_store(), dist.get_rank()
    job = f"mbridge_fsdp_ckpt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store.set(f"{_HOSTS}/{rank}", socket.gethostname())
    number = store.add(f"{job}/{rank}/agreements", 1)  # counted in the store: a new process group starts anew
    return Agreement(f"{job}/{number}/{purpose}", rank, dist.get_world_size(), time_limit, store)


def _default_store() -> Any:
    """The rendezvous store of the default process group (torch 2.13 `distributed_c10d._get_default_store`)."""
    from torch.distributed import distributed_c10d

    getter = getattr(distributed_c10d, "_get_default_store", None)
    if getter is None:
        raise InternalError(
            expected="torch.distributed.distributed_c10d._get_default_store",
            found="a torch without it",
            remedy="Use a supported torch; see docs/compatibility.md.",
        )
    return getter()
