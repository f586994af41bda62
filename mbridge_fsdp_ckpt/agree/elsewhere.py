"""Sequences of meetings that a rank lets another process attend in its place."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Self

import torch.distributed as dist

from mbridge_fsdp_ckpt.agree.agreement import Agreement, check_limits, default_store, next_name
from mbridge_fsdp_ckpt.agree.meeting import lost
from mbridge_fsdp_ckpt.agree.signs import STORE_ERRORS, key_of
from mbridge_fsdp_ckpt.errors import ConfigurationError


class _Name:
    """The name of a sequence, which the store is asked for once, by the thread that first needs it.

    Names are given in the order in which sequences began: who asks for one asks for those before it, too.

    Args:
        store: The store: the job may have left its process group when it is asked.
        rank: Who asks.
        before: The name before, if there is one.
    """

    def __init__(self, store: dist.Store, rank: int, before: _Name | None) -> None:
        self._rank, self._known, self._asking = rank, "", threading.Lock()
        self._to_ask: tuple[dist.Store, _Name | None] | None = (store, before)  # a store serves while it is known

    def get(self) -> str:
        """The name; one request to the store, the first time."""
        with self._asking:
            if self._to_ask is not None:
                store, before = self._to_ask
                if before is not None:
                    before.get()
                self._known, self._to_ask = next_name(store, self._rank, "beside"), None
            return self._known


_last: _Name | None = None


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank's seat in a sequence of meetings: whoever has it can take it.

    Args:
        purpose: What the sequence is for, and where.
        rank: The rank.
        world_size: All ranks.
        time_limit: See `Agreement`.
        storage_limit: See `Agreement`.
        host: Who serves the rendezvous store; empty with a single rank, as what follows.
        port: And where.
        named: The name of the sequence, or who knows it.
    """

    purpose: str
    rank: int
    world_size: int
    time_limit: float
    storage_limit: float
    host: str = ""
    port: int = 0
    named: str | _Name = ""

    @classmethod
    def next(cls, purpose: str, time_limit: float, storage_limit: float) -> Self:
        """The seat of this rank in the next sequence; every rank calls it once for each.

        The store is not asked yet: it would answer thousands of ranks while they all wait to train on.

        Raises:
            ConfigurationError: A limit is not positive, or another process cannot reach the job's store.
        """
        global _last
        check_limits(time_limit, storage_limit)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if world_size == 1:
            return cls(purpose, 0, 1, time_limit, storage_limit)
        store, rank = served_store(), dist.get_rank()
        _last = _Name(store, rank, _last)
        return cls(purpose, rank, world_size, time_limit, storage_limit, store.host, store.port, _last)

    @property
    def name(self) -> str:
        """Of the sequence; empty with a single rank.  Perhaps one request to the store.

        Raises:
            RankMissingError: The store does not answer.
        """
        if isinstance(self.named, str):
            return self.named
        try:
            return self.named.get()
        except STORE_ERRORS as error:
            raise lost(error, self.purpose, self.rank) from error

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> Self:
        """What `to_wire` gave."""
        return cls(**data)

    def to_wire(self) -> dict[str, Any]:
        """As JSON-able data.

        Raises:
            RankMissingError: See `name`.
        """
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"named": self.name}

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

    def vouch(self, store: dist.Store) -> None:
        """Give a sign of life, in the job's store, for whoever is about to take the seat."""
        store.add(key_of(self.name), 1)

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
