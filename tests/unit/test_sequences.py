# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Rank 0 numbers what ranks begin; a rank that missed a call, or made one too many, is named and meets again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest

from mbridge_fsdp_ckpt.coordination import incarnation, meeting
from mbridge_fsdp_ckpt.coordination.coordination import Coordination
from mbridge_fsdp_ckpt.coordination.incarnation import Incarnation, _Sequences
from mbridge_fsdp_ckpt.coordination.rounds import Arrival
from mbridge_fsdp_ckpt.errors import CheckpointError, ConfigurationError, RankMissingError
from tests.unit.test_coordination import Server, outcomes

LIMIT_S = 3.0


@pytest.fixture(scope="module")
def server() -> Server:
    return Server(3)


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "GRACE", 0.0)


class Job:
    """A rank of a job, as `_Sequences` sees it."""

    def __init__(self, server: Server, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self._store = rank, world_size, server.connection(rank)

    def store(self, limit: float, kind: str) -> Any:
        return self._store


class Rank:
    """A rank that calls save; every call has one meeting."""

    names = 0

    def __init__(self, server: Server, rank: int, world_size: int = 2) -> None:
        self.rank, self.job = rank, Job(server, rank, world_size)
        self.sequences = _Sequences(f"mbridge_fsdp_ckpt/{Rank.names}/call", "call", cast("Incarnation", self.job))

    @classmethod
    def all_of(cls, server: Server, world_size: int = 2) -> list[Rank]:
        cls.names += 1
        return [cls(server, rank, world_size) for rank in range(world_size)]

    def call(self, purpose: str, limit: float = LIMIT_S) -> int:
        """The number of the sequence in which all ranks meet."""
        if self.rank == 0:
            found = self.sequences.open(purpose, "", limit)
        else:
            found = self.sequences.join(purpose, limit, limit)
        store = self.job.store(limit, "call")
        a = Coordination(found.name, self.rank, self.job.world_size, limit, store)
        a.meet(Arrival(purpose, None))
        a.end()
        return found.number

    def calls(self, *purposes: str, limit: float = LIMIT_S) -> list[int | CheckpointError]:
        """Calls one after the other."""
        return [outcomes([partial(self.call, purpose, limit)])[0] for purpose in purposes]


def together(*actions: Callable[[], Any]) -> list[Any]:
    return outcomes(actions)


def test_a_rank_that_missed_a_call_is_named_and_the_next_call_meets_again(server: Server) -> None:
    zero, one = Rank.all_of(server)
    assert together(lambda: zero.call("a"), lambda: one.call("a")) == [1, 1]
    error = zero.calls("b", limit=0.5)[0]
    assert isinstance(error, RankMissingError)
    assert "no sign of rank 1" in str(error)
    for number, purpose in enumerate("cde", 3):
        assert together(*(partial(rank.call, purpose) for rank in (zero, one))) == [number] * 2


def test_a_rank_that_missed_a_call_that_goes_on_ends_it_by_name_and_both_meet_at_the_next(server: Server) -> None:
    """As asynchronous saves do: rank 0 still waits for rank 1 in the save before, and then begins the next."""
    zero, one = Rank.all_of(server)
    begin = time.monotonic()
    (first, *others), found = together(lambda: zero.calls("a", "b", "c", limit=60), lambda: one.calls("b", "c"))
    assert isinstance(first, ConfigurationError)
    assert "on rank 0: a, on rank 1: b" in str(first)
    assert others == found == [2, 3]
    assert time.monotonic() - begin < 50


def test_a_rank_with_one_call_too_many_is_named_and_the_next_call_meets_again(server: Server) -> None:
    zero, one = Rank.all_of(server)
    error = one.calls("extra", limit=0.5)[0]
    assert isinstance(error, RankMissingError)
    assert "no sign of rank 0" in str(error)
    assert "one call ahead" in str(error)
    assert together(lambda: zero.calls("a", "b"), lambda: one.calls("a", "b")) == [[1, 2]] * 2


def test_a_rank_0_that_comes_too_late_meets_the_others_at_the_next_call(server: Server) -> None:
    zero, one = Rank.all_of(server)
    assert isinstance(one.calls("a", limit=0.5)[0], RankMissingError)
    (late, *others), found = together(lambda: zero.calls("a", "b", limit=60), lambda: one.calls("b"))
    assert isinstance(late, ConfigurationError)
    assert others == found == [2]


def test_ranks_that_begin_different_things_hear_the_same_and_meet_at_the_next_call(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incarnation, "_SECOND_THOUGHT", 0.5)
    ranks = Rank.all_of(server, 3)
    begun = ["save to a", "load from b", "save to a"]
    found = together(*(partial(rank.calls, begun[rank.rank], "save to c", limit=60) for rank in ranks))
    errors, later = zip(*found, strict=True)
    assert {str(error) for error in errors} == {str(errors[0])}
    assert "on rank 0: save to a, on rank 1: load from b" in str(errors[0])
    assert later == (2, 2, 2)


def test_a_rank_far_behind_finds_the_others_though_what_it_missed_is_deleted(server: Server) -> None:
    zero, one, two = Rank.all_of(server, 3)
    assert together(*(partial(rank.call, "a") for rank in (zero, one, two))) == [1, 1, 1]
    for rank in (zero, one):
        rank.job.world_size = 2
    for number in range(2, 9):
        assert together(lambda: zero.call("b"), lambda: one.call("b")) == [number, number]
    for rank in (zero, one):
        rank.job.world_size = 3
    assert together(*(partial(rank.call, "c", 8.0) for rank in (zero, one, two))) == [9, 9, 9]


def test_what_ranks_wrote_is_deleted_two_sequences_later(server: Server) -> None:
    zero, one = Rank.all_of(server)
    keys = []
    for number in range(12):
        purpose = f"save {number}"
        if number == 5:
            zero.calls(purpose, limit=0.3)  # rank 1 misses it
        else:
            together(*(partial(rank.call, purpose) for rank in (zero, one)))
        keys.append(server.server.num_keys())
    assert keys[4] == keys[3] == keys[2]
    assert keys[-1] == keys[4]


def test_an_error_is_not_lost_where_a_rank_waits_for_rank_0_in_vain(server: Server) -> None:
    """Heartbeats of others keep it waiting; without any it gives up."""
    _, one = Rank.all_of(server)
    alive = threading.Event()

    def heartbeat() -> None:
        while not alive.wait(0.05):
            server.connection(2).add(f"{one.sequences.name}/beats", 1)

    beating = threading.Thread(target=heartbeat)
    beating.start()
    begin = time.monotonic()
    stopping = threading.Timer(2.0, alive.set)
    stopping.start()
    assert isinstance(one.calls("a", limit=0.5)[0], RankMissingError)
    assert time.monotonic() - begin > 2.0
    beating.join()
