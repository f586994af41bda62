# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Sequences of meetings that another process, such as the checkpoint process, attends in a rank's place."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, fields
from typing import Any, Self

import torch.distributed as dist

from mbridge_fsdp_ckpt.coordination.coordination import Coordination, check_limits
from mbridge_fsdp_ckpt.coordination.heartbeat import STORE_ERRORS, key_of
from mbridge_fsdp_ckpt.coordination.incarnation import Incarnation, Opened, connection, incarnation
from mbridge_fsdp_ckpt.coordination.meeting import lost
from mbridge_fsdp_ckpt.errors import CheckpointError


@dataclass(slots=True)
class _Joining:
    """The next sequence of a job.  Rank 0 opens it and all others join it, once, in the thread that first needs it.

    Args:
        job: The incarnation, kept because the process group may be destroyed by then.
    """

    job: Incarnation
    _asking: threading.Lock = field(default_factory=threading.Lock)
    _found: Opened | CheckpointError | None = field(default=None)

    def join(self, participant: Participant, note: str = "") -> Opened:
        """Begin the sequence, as `Incarnation.join` does.  Later calls get the same answer, or raise the same error.

        Args:
            participant: This rank's part in the sequence.
            note: On rank 0, the answer that all ranks read with the name.

        Raises:
            CheckpointError: The ranks begin different things, or the store does not answer.
        """
        with self._asking:
            if self._found is None:
                limits = participant.time_limit, participant.storage_limit
                try:
                    self._found = self.job.join("async", participant.purpose, note, limits)
                except CheckpointError as error:
                    self._found = error
                except STORE_ERRORS as error:
                    self._found = lost(error, participant.purpose, participant.rank)
            if isinstance(self._found, CheckpointError):
                raise self._found
            return self._found

    def first_says(self, participant: Participant, word: str, about: str) -> str:
        """Answer a question for all ranks: see `Participant.first_says`.

        Rank 0 deletes the key of the last question but one, which all ranks have asked by then.

        Raises:
            DistError, OSError: The store does not answer.
        """
        store, key = self.job.store(participant.time_limit, "call"), f"{self.join(participant).name}/{about}"
        answer = store.compare_set(key, "", word).decode()
        self.job.question_keys.append(key)
        if len(self.job.question_keys) > 2:  # nobody is two questions behind
            spent = self.job.question_keys.pop(0)
            if participant.rank == 0:
                store.delete_key(spent)
        return answer


@dataclass(frozen=True, slots=True)
class Participant:
    """A rank's part in a sequence of meetings, as data: another process can attend in its place.

    Args:
        purpose: What the sequence is for, and where.
        rank: The rank.
        world_size: All ranks.
        time_limit: See `Coordination`.
        storage_limit: See `Coordination`.
        host: The host that serves the rendezvous store; empty with a single rank.
        port: The port of the store there; 0 with a single rank.
        named: The name of the sequence, or an object that begins the sequence when the name is needed; empty with a
            single rank.
    """

    purpose: str
    rank: int
    world_size: int
    time_limit: float
    storage_limit: float
    host: str = ""
    port: int = 0
    named: str | _Joining = ""

    @classmethod
    def next(cls, purpose: str, time_limit: float, storage_limit: float) -> Self:
        """This rank's part in the next sequence.  Every rank calls it once for each sequence.

        It makes no request to the store yet: training would wait while the store answers thousands of ranks.

        Raises:
            ConfigurationError: A limit is not positive, or another process cannot reach the job's store.
        """
        check_limits(time_limit, storage_limit)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if world_size == 1:
            return cls(purpose, 0, 1, time_limit, storage_limit)
        job = incarnation()
        return cls(purpose, job.rank, world_size, time_limit, storage_limit, job.host, job.port, _Joining(job))

    @property
    def name(self) -> str:
        """The name of the sequence; empty with a single rank.  The first call may make requests to the store.

        Raises:
            ConfigurationError: The ranks begin different things.
            RankMissingError: The store does not answer, or rank 0 has not begun.
        """
        return self.named if isinstance(self.named, str) else self.named.join(self).name

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> Self:
        """The participant that `to_wire` described."""
        return cls(**data)

    def to_wire(self) -> dict[str, Any]:
        """The participant as JSON-able data.

        Raises:
            CheckpointError: See `name`.
        """
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"named": self.name}

    def rank_0_says(self, word: str) -> str:
        """Rank 0's answer, given as it begins the sequence.  All ranks ask before they use the sequence otherwise.

        Args:
            word: The answer of this rank, which counts on rank 0.

        Raises:
            CheckpointError: See `name`.
        """
        return word if isinstance(self.named, str) else self.named.join(self, word).note

    def first_says(self, word: str, about: str) -> str:
        """The answer of the first rank that asks, for all ranks.  It makes one request to the store.

        Args:
            word: The answer of this rank.
            about: A name for the question, the same on all ranks and new each time, such as the number of a step.

        Raises:
            CheckpointError: See `name`.
        """
        if isinstance(self.named, str):
            return word
        try:
            return self.named.first_says(self, word, about)
        except STORE_ERRORS as error:
            raise lost(error, self.purpose, self.rank) from error

    def vouch(self) -> None:
        """Give a heartbeat in place of the process that is about to attend.  Called in the rank's own process.

        Raises:
            CheckpointError: See `name`.
        """
        if isinstance(self.named, str):
            return
        try:
            self.named.job.store(self.time_limit, "async").add(key_of(self.name), 1)
        except STORE_ERRORS as error:
            raise lost(error, self.purpose, self.rank) from error

    def take(self) -> Coordination:
        """The coordination of the sequence, over a new connection, which `Coordination.close` closes.

        Raises:
            CheckpointError: See `name`.
        """
        name, limits = self.name, (self.time_limit, self.storage_limit)
        if not name:
            return Coordination(self.purpose, 0, 1, limits[0], storage_limit=limits[1])
        own = connection(self.host, self.port, limits[0])
        coordination = Coordination(
            name, self.rank, self.world_size, limits[0], own.within(limits[0]), limits[1], owned=own
        )
        try:
            coordination.make_up()
        except STORE_ERRORS as error:
            coordination.close()
            raise lost(error, self.purpose, self.rank) from error
        return coordination
