"""Sequences of meetings that a rank lets another process attend in its place."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mbridge_fsdp_ckpt.agree.agreement import Agreement, check_limits, default_store, next_name
from mbridge_fsdp_ckpt.agree.meeting import lost
from mbridge_fsdp_ckpt.agree.signs import STORE_ERRORS, key_of
from mbridge_fsdp_ckpt.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank's seat in a sequence of meetings, as data: whoever has it can take it.

    Args:
        purpose: What the sequence is for, and where.
        rank: The rank.
        world_size: All ranks.
        time_limit: See `Agreement`.
        storage_limit: See `Agreement`.
        name: Of the sequence; empty with a single rank, as what follows.
        host: Who serves the rendezvous store.
        port: And where.
    """

    purpose: str
    rank: int
    world_size: int
    time_limit: float
    storage_limit: float
    name: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def next(cls, purpose: str, time_limit: float, storage_limit: float) -> Seat:
        """The seat of this rank in the next sequence; every rank calls it once for each.  One request to the store.

        Raises:
            ConfigurationError: A limit is not positive, or another process cannot reach the job's store.
            RankMissingError: The store does not answer.
        """
        check_limits(time_limit, storage_limit)
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(purpose, 0, 1, time_limit, storage_limit)
        store, rank = served_store(), dist.get_rank()
        try:
            name = next_name(store, rank, "beside")
        except STORE_ERRORS as error:
            raise lost(error, purpose, rank) from error
        return cls(purpose, rank, dist.get_world_size(), time_limit, storage_limit, name, store.host, store.port)

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> Seat:
        """What `to_wire` gave."""
        return cls(**data)

    def to_wire(self) -> dict[str, Any]:
        """As JSON-able data."""
        return asdict(self)

    def first_says(self, word: str, about: str = "first") -> str:
        """What the first of all ranks says that asks; one request to the store.

        Args:
            word: What this rank would say.
            about: What it is asked about.

        Raises:
            RankMissingError: The store does not answer.
        """
        if not self.name:
            return word
        try:
            return served_store().compare_set(f"{self.name}/{about}", "", word).decode()
        except STORE_ERRORS as error:
            raise lost(error, self.purpose, self.rank) from error

    def vouch(self) -> None:
        """Give a sign of life for whoever is about to take the seat."""
        if self.name:
            served_store().add(key_of(self.name), 1)

    def take(self) -> Agreement:
        """Attend in the rank's place, over a connection of one's own.

        Raises:
            ConfigurationError: The ranks begin different things.
            RankMissingError: The store does not answer.
        """
        if not self.name:
            return Agreement(self.purpose, 0, 1, self.time_limit, storage_limit=self.storage_limit)
        try:
            store = dist.TCPStore(self.host, self.port, None, False, timedelta(seconds=self.time_limit))
            agreement = Agreement(self.name, self.rank, self.world_size, self.time_limit, store, self.storage_limit)
            agreement.begin(self.purpose)
        except STORE_ERRORS as error:
            raise lost(error, self.purpose, self.rank) from error
        return agreement


def served_store() -> dist.TCPStore:
    """The job's rendezvous store below all prefixes, as another process sees it.

    Raises:
        ConfigurationError: It is none that others can connect to.
    """
    store = default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        raise ConfigurationError(
            expected="a job that met in a TCPStore (init_method='env://' or 'tcp://', torchrun), to save beside it",
            found=type(store).__name__,
            remedy="Start it with torchrun, or save without background=True.",
        )
    return store
