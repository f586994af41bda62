"""The one exchange between ranks: all arrive with a message, one judges, all get the same verdict.

No collective.  Ranks meet in the job's rendezvous store (`TCPStore` under torchrun), where waiting has a time limit
and who is missing can be told by name.  A collective has neither: a rank that raised before it leaves the others
waiting until a watchdog ends the job.

    rank r                                   judge (rank 0)
      set  <meeting>/<r> = message             wait until all arrived, one failed, or the limit is over
      wait <meeting>/verdict                   set <meeting>/verdict = answer, or the error for everyone

Who waits in vain writes its error to <meeting>/outcome, once for all: whoever comes later raises the same.  A judge
about to do what cannot be undone seals the meeting there first; from then on nobody gives up before the verdict.

Who comes first in a sequence writes what it begins: whoever begins something else fails at once, and with it all.
Rank 0 serves the store in many jobs: after the last word of a sequence it stays a little, until everyone has read it.

Cost: a constant number of store requests a rank, messages bounded by the caller, one reader.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from mbridge_fsdp_ckpt.agree.signs import STORE_ERRORS, Signs, Watch
from mbridge_fsdp_ckpt.agree.wire import Judge, judged, to_wire
from mbridge_fsdp_ckpt.errors import CheckpointError, ConfigurationError, InternalError, RankMissingError, brief
from mbridge_fsdp_ckpt.settings import DEFAULT_STORAGE_LIMIT, DEFAULT_TIME_LIMIT

_GRACE = 15.0  # seconds that others wait for the judge's verdict beyond the limit it waited itself
_LAST_WORD = 5.0, 0.005, 0.1  # seconds that rank 0 waits until it is read; between looks, first and longest
_RENEWED = 60.0  # seconds after which rank 0, while it waits, does what it does with each step
_MISSING_NAMED = 32

_SEALED = "sealed"
_HOSTS = "mbridge_fsdp_ckpt/hosts"

_log = logging.getLogger(__name__)


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
        storage_limit: Seconds that a rank may be inside one call of the storage, without a step of its own.
        on_beat: Called with every step, in the thread that works.
    """

    name: str
    rank: int
    world_size: int
    time_limit: float
    store: Any = None
    storage_limit: float = DEFAULT_STORAGE_LIMIT
    on_beat: Callable[[], None] = lambda: None
    _meetings: int = field(default=0)
    _sealed: bool = field(default=False)
    _signs: Signs = field(init=False)

    def __post_init__(self) -> None:
        self._signs = Signs(self.store, self.name, self.time_limit, self.storage_limit)

    def begin(self, purpose: str) -> None:
        """Before the first meeting: what this rank is about to do, and where.

        Raises:
            ConfigurationError: The ranks begin different things.
        """
        if self.store is None:
            return
        own = json.dumps([self.rank, purpose])
        first, begun = json.loads(self.store.compare_set(f"{self.name}/purpose", "", own))
        if begun != purpose:
            named = sorted([(first, begun), (self.rank, purpose)])
            error = ConfigurationError(
                expected="all ranks to begin the same save or load",
                found=", ".join(f"rank {rank}: {what}" for rank, what in named),
                remedy="Call save and load in the same order and with the same directory on every rank.",
            )
            self.meet("beginning", error, lambda messages: None)

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
        wire = to_wire(message, phase, self.rank)
        if self.store is None:
            verdict = judged([wire], judge, phase)
        else:
            verdict = self._meet_in_store(f"{self.name}/{self._meetings}", phase, wire, judge)
        if "failed" in verdict:
            self.end()
            raise CheckpointError.from_wire(verdict["failed"])
        return verdict["answer"]

    def end(self) -> None:
        """After the last meeting: rank 0 stays until the others have read the verdict.  An error is a last word too."""
        if self.store is None:
            return
        key, (limit, pause, longest) = f"{self.name}/{self._meetings}/read", _LAST_WORD
        until = time.monotonic() + min(limit, self.time_limit)
        try:
            readers = int(self.store.add(key, int(self.rank != 0)))
            while self.rank == 0 and readers < self.world_size - 1 and time.monotonic() < until:
                time.sleep(pause)
                pause = min(pause * 1.5, longest)
                readers = int(self.store.add(key, 0))
        except STORE_ERRORS as error:  # the verdict is known here, and that is all that counts
            _log.info("rank 0 does not hear that rank %d read its verdict: %s", self.rank, error)

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
        except STORE_ERRORS:
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
        """After each step of long work: others waiting for this rank begin their limit anew.  Cheap to call."""
        self.on_beat()
        self._signs.give()

    def at_work(self) -> AbstractContextManager[None]:
        """Around all that touches storage between meetings, on any rank: a call that takes long is no silence.

            with agreement.at_work():
                for item in items:
                    write(item)         # may block for up to the storage limit
                    agreement.beat()    # a step is done: that limit, too, begins anew

        A judge is inside one already, and blocks may be nested.  Leave out what waits for other ranks, or for nothing
        of the storage's: who is stuck there is to be named within the time limit.
        """
        return self._signs.at_work()

    def _meet_in_store(self, prefix: str, phase: str, wire: dict[str, Any], judge: Judge) -> dict[str, Any]:
        try:
            self._arrive(prefix, wire)
            return self._lead(prefix, phase, judge) if self.rank == 0 else self._follow(prefix, phase)
        except STORE_ERRORS as error:
            return {"failed": _lost(error, phase, self.rank).to_wire()}

    def _arrive(self, prefix: str, wire: dict[str, Any]) -> None:
        self.store.set(f"{prefix}/{self.rank}", json.dumps(wire))
        if "failed" in wire:
            self.store.set(f"{prefix}/failed", str(self.rank))
        self.store.add(f"{prefix}/arrived", 1)

    def _lead(self, prefix: str, phase: str, judge: Judge) -> dict[str, Any]:
        """Rank 0: collect, judge, publish.  An early failure does not wait for the rest."""
        watch, renewed = Watch(self._signs, self.time_limit), time.monotonic()
        while int(self.store.add(f"{prefix}/arrived", 0)) < self.world_size:
            if time.monotonic() - renewed > _RENEWED:
                renewed = time.monotonic()
                with self.at_work():
                    self.on_beat()
            if self.store.check([f"{prefix}/failed"]):
                failed = int(self.store.get(f"{prefix}/failed"))
                return self._publish(prefix, json.loads(self.store.get(f"{prefix}/{failed}")))
            if watch.over():
                return self._publish(prefix, {"failed": json.loads(self._give_up(prefix, phase))})
        wires = [json.loads(self.store.get(f"{prefix}/{rank}")) for rank in range(self.world_size)]
        with self.at_work():
            verdict = judged(wires, judge, phase)
        outcome = self._settle(prefix, _SEALED)
        return self._publish(prefix, verdict if outcome == _SEALED else {"failed": json.loads(outcome)})

    def _follow(self, prefix: str, phase: str) -> dict[str, Any]:
        watch, sealed = Watch(self._signs, self.time_limit + _GRACE), False
        while not self.store.check([f"{prefix}/verdict"]):
            outcome = self._outcome(prefix)
            if not outcome and watch.over():
                outcome = self._give_up(prefix, phase)
            if outcome == _SEALED and not sealed:
                watch, sealed = Watch(self._signs, self.time_limit + _GRACE), True
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


def next_agreement(
    purpose: str, time_limit: float = DEFAULT_TIME_LIMIT, storage_limit: float = DEFAULT_STORAGE_LIMIT
) -> Agreement:
    """The next sequence of meetings of all ranks of this job.  Every rank calls it once a save or load, first thing.

    Args:
        purpose: What for, and where: "save to /checkpoints/iter_0000010".
        time_limit: See `Agreement`.
        storage_limit: See `Agreement`.

    Raises:
        ConfigurationError: A limit is not positive, or the ranks begin different things.
        RankMissingError: The store does not answer.
    """
    for name, limit, usual in (
        ("time", time_limit, DEFAULT_TIME_LIMIT),
        ("storage", storage_limit, DEFAULT_STORAGE_LIMIT),
    ):
        if not limit > 0:
            raise ConfigurationError(
                expected=f"a positive {name} limit in seconds",
                found=str(limit),
                remedy=f"Set {name}_limit to {usual:g}, say.",
            )
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Agreement(purpose, 0, 1, time_limit)
    store, rank = _default_store(), dist.get_rank()
    job = f"mbridge_fsdp_ckpt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    try:
        store.set(f"{_HOSTS}/{rank}", socket.gethostname())
        number = store.add(f"{job}/{rank}/agreements", 1)  # counted in the store: a new process group starts anew
        agreement = Agreement(f"{job}/{number}", rank, dist.get_world_size(), time_limit, store, storage_limit)
        agreement.begin(purpose)
    except STORE_ERRORS as error:
        raise _lost(error, purpose, rank) from error
    return agreement


def _lost(error: BaseException, phase: str, rank: int) -> RankMissingError:
    return RankMissingError(
        expected=f"the job's rendezvous store to answer at {phase!r}",
        found=brief(error),
        remedy="Rank 0, or the process that serves the store, has ended: look at its log.",
        rank=rank,
    )


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
