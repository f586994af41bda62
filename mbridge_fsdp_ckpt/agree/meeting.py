"""One meeting in the job's rendezvous store (`TCPStore` under torchrun).

    rank r                                   judge (rank 0)
      set  <meeting>/<r> = message             wait until all arrived, one failed, or the limit is over
      wait <meeting>/verdict                   set <meeting>/verdict = answer, or the error for everyone

Who waits in vain writes its error to <meeting>/outcome, once for all: whoever comes later raises the same.  A judge
about to do what cannot be undone seals the meeting there first; from then on nobody gives up before the verdict.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from mbridge_fsdp_ckpt.agree.signs import STORE_ERRORS, Signs, Watch
from mbridge_fsdp_ckpt.agree.wire import Judge, Wire, judged
from mbridge_fsdp_ckpt.errors import CheckpointError, ErrorData, RankMissingError, brief

HOSTS = "mbridge_fsdp_ckpt/hosts"
"""Below it, ranks write what host they are on."""

_GRACE = 15.0  # seconds that others wait for the judge's verdict beyond the limit it waited itself
_LAST_WORD = 5.0, 0.005, 0.1  # seconds that rank 0 waits until it is read; between looks, first and longest
_RENEWED = 60.0  # seconds after which rank 0, while it waits, does what it does with each step
_MISSING_NAMED = 32

_SEALED = "sealed"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Meeting:
    """All ranks meet once.

    Args:
        store: The store.
        name: Common to all ranks, and new for each meeting.
        phase: What the meeting is for, in errors.
        rank: This rank.
        world_size: All ranks.
        time_limit: See `Agreement`.
        signs: Signs of life of all ranks.
        renew: What rank 0 does now and then while it waits.
    """

    store: dist.Store
    name: str
    phase: str
    rank: int
    world_size: int
    time_limit: float
    signs: Signs
    renew: Callable[[], None]

    def meet[M, V](self, wire: Wire[M], judge: Judge[M, V]) -> Wire[V]:
        """Bring what this rank has to say; returns the verdict."""
        try:
            self._arrive(wire)
            return self._lead(judge) if self.rank == 0 else self._follow()
        except STORE_ERRORS as error:
            return {"failed": lost(error, self.phase, self.rank).to_wire()}

    def fail(self, error: CheckpointError) -> None:
        """Let this be everyone's error, whatever else goes wrong, unless there is one already."""
        self._settle(json.dumps(error.to_wire()))

    def seal(self) -> None:
        """Nobody gives up any more.

        Raises:
            CheckpointError: Somebody has.
        """
        outcome = self._settle(_SEALED)
        if outcome != _SEALED:
            raise CheckpointError.from_wire(json.loads(outcome))

    def was_sealed(self) -> bool:
        """Whether nobody gave up, as far as can be told."""
        try:
            return self._outcome() == _SEALED
        except STORE_ERRORS:
            return True  # nobody knows

    def leave(self) -> None:
        """Say that this rank has read the verdict; rank 0 stays until the others have."""
        key, (limit, pause, longest) = f"{self.name}/read", _LAST_WORD
        until = time.monotonic() + min(limit, self.time_limit)
        try:
            readers = self.store.add(key, int(self.rank != 0))
            while self.rank == 0 and readers < self.world_size - 1 and time.monotonic() < until:
                time.sleep(pause)
                pause = min(pause * 1.5, longest)
                readers = self.store.add(key, 0)
        except STORE_ERRORS as error:  # the verdict is known here, and that is all that counts
            _log.info("rank 0 does not hear that rank %d read its verdict: %s", self.rank, error)

    def _settle(self, outcome: str) -> str:
        """Write the meeting's outcome unless there is one; returns the one that holds."""
        return self.store.compare_set(f"{self.name}/outcome", "", outcome).decode()

    def _outcome(self) -> str:
        """What holds so far; empty where nothing does."""
        key = f"{self.name}/outcome"
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _arrive[M](self, wire: Wire[M]) -> None:
        self.store.set(f"{self.name}/{self.rank}", json.dumps(wire))
        if "failed" in wire:
            self.store.set(f"{self.name}/failed", str(self.rank))
        self.store.add(f"{self.name}/arrived", 1)

    def _lead[M, V](self, judge: Judge[M, V]) -> Wire[V]:
        """Rank 0: collect, judge, publish.  An early failure does not wait for the rest."""
        watch, renewed = Watch(self.signs, self.time_limit), time.monotonic()
        while self.store.add(f"{self.name}/arrived", 0) < self.world_size:
            if time.monotonic() - renewed > _RENEWED:
                renewed = time.monotonic()
                with self.signs.at_work():
                    self.renew()
            if self.store.check([f"{self.name}/failed"]):
                failed = int(self.store.get(f"{self.name}/failed"))
                error: ErrorData = json.loads(self.store.get(f"{self.name}/{failed}"))["failed"]
                return self._publish({"failed": json.loads(self._settle(json.dumps(error)))})
            if watch.over():
                return self._publish({"failed": json.loads(self._give_up())})
        wires = [json.loads(self.store.get(f"{self.name}/{rank}")) for rank in range(self.world_size)]
        with self.signs.at_work():
            verdict = judged(wires, judge, self.phase)
        outcome = self._settle(_SEALED)
        return self._publish(verdict if outcome == _SEALED else {"failed": json.loads(outcome)})

    def _follow[V](self) -> Wire[V]:
        watch, sealed = Watch(self.signs, self.time_limit + _GRACE), False
        while not self.store.check([f"{self.name}/verdict"]):
            outcome = self._outcome()
            if not outcome and watch.over():
                outcome = self._give_up()
            if outcome == _SEALED and not sealed:
                watch, sealed = Watch(self.signs, self.time_limit + _GRACE), True
            elif outcome and outcome != _SEALED:
                return {"failed": json.loads(outcome)}
            if sealed and watch.over():
                return {"failed": self._missing(sealed=True)}
        verdict: Wire[V] = json.loads(self.store.get(f"{self.name}/verdict"))
        return verdict

    def _give_up(self) -> str:
        return self._settle(json.dumps(self._missing()))

    def _publish[V](self, verdict: Wire[V]) -> Wire[V]:
        self.store.set(f"{self.name}/verdict", json.dumps(verdict))
        for rank in range(self.world_size):
            self.store.delete_key(f"{self.name}/{rank}")
        return verdict

    def _missing(self, *, sealed: bool = False) -> ErrorData:
        absent = [rank for rank in range(self.world_size) if not self.store.check([f"{self.name}/{rank}"])]
        named = ", ".join(map(self._with_host, absent[:_MISSING_NAMED]))
        named += ", ..." if len(absent) > _MISSING_NAMED else ""
        remedy = "Look at the logs of these ranks; raise the time limit if they were only slow."
        return RankMissingError(
            expected=f"all {self.world_size} ranks at {self.phase!r} within {self.time_limit:g} s",
            found=f"no sign of rank {named}" if absent and not sealed else f"no verdict of rank {self._with_host(0)}",
            remedy=f"It was about to finish: look whether the checkpoint is there. {remedy}" if sealed else remedy,
        ).to_wire()

    def _with_host(self, rank: int) -> str:
        key = f"{HOSTS}/{rank}"
        return f"{rank} on {self.store.get(key).decode()}" if self.store.check([key]) else str(rank)


def lost(error: BaseException, phase: str, rank: int) -> RankMissingError:
    """The error for a store that does not answer any more."""
    return RankMissingError(
        expected=f"the job's rendezvous store to answer at {phase!r}",
        found=brief(error),
        remedy="Rank 0, or the process that serves the store, has ended: look at its log.",
        rank=rank,
    )
