# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The requests of meetings, made to a real store: how many there are, and what the others hear when a rank stops."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from mbridge_fsdp_ckpt.coordination import coordination, meeting, protocol
from mbridge_fsdp_ckpt.coordination.coordination import Coordination
from mbridge_fsdp_ckpt.coordination.heartbeat import Heartbeats
from mbridge_fsdp_ckpt.coordination.meeting import Meeting
from mbridge_fsdp_ckpt.coordination.protocol import ARITY, Node
from mbridge_fsdp_ckpt.errors import CheckpointError, KeyMismatchError, RankFailedError, RankMissingError
from tests.unit.rounds import Asked, joined
from tests.unit.test_coordination import AMPLE, Server, outcomes, same_error, trouble

WORLD = 5  # at two children a rank: 0 has 1 and 2, 1 has 3 and 4


class Died(BaseException):
    """In place of the end of a process, in a thread."""


class Watched:
    """A store that counts requests by what they are; after so many it is as if its rank had died."""

    def __init__(self, store: Any, lives: int | None = None) -> None:
        self.store, self.lives, self.requests = store, lives, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        def request(keys: Any, *arguments: Any) -> Any:
            if self.requests.total() == self.lives:
                raise Died
            key = keys if isinstance(keys, str) else keys[0]
            self.requests[f"{name} {key.rpartition('/')[2]}"] += 1
            return getattr(self.store, name)(keys, *arguments)

        return request if name != "has_extended_api" else self.store.has_extended_api


@pytest.fixture(scope="module")
def server() -> Server:
    return Server(WORLD)


@pytest.fixture
def small_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Meeting, "_node", property(lambda met: Node(met.rank, met.world_size, 2)))
    monkeypatch.setattr(meeting, "GRACE", 0.3)
    monkeypatch.setattr(meeting, "_LAST_WORD", 0.2)


def ranks(server: Server, time_limit: float = AMPLE) -> list[Coordination]:
    return server.ranks(WORLD, time_limit)


def meet(a: Coordination) -> Any:
    return a.meet(Asked("commit", [a.rank], sorted))


def test_everybodys_message_passes_through_the_tree(server: Server, small_tree: None) -> None:
    assert outcomes([lambda a=a: meet(a) for a in ranks(server)]) == [list(range(WORLD))] * WORLD


def test_who_combines_gets_its_own_message_first_and_then_those_below_it(server: Server, small_tree: None) -> None:
    seen: dict[int, Any] = {}

    def bring(a: Coordination) -> Any:
        def combine(messages: list[Any]) -> Any:
            seen[a.rank] = messages
            return joined(messages)

        return a.meet(Asked("commit", [a.rank], len, combine))

    assert outcomes([lambda a=a: bring(a) for a in ranks(server)]) == [WORLD] * WORLD
    assert seen == {0: [[0], [1, 3, 4], [2]], 1: [[1], [3], [4]], 2: [[2]], 3: [[3]], 4: [[4]]}


@pytest.mark.parametrize("victim", [0, 1, 3], ids=["root", "inner", "leaf"])
@pytest.mark.parametrize("lives", [0, 1, 4])
def test_whoever_dies_all_others_hear_the_same(victim: int, lives: int, server: Server, small_tree: None) -> None:
    """Who has brought its message is not missed: a leaf by its first request, an inner rank by its fourth one if its
    children's are there when it first looks, as on a machine that is busy."""
    all_ranks = ranks(server, 0.4)
    watched = Watched(all_ranks[victim].store, lives)
    all_ranks[victim].store = watched

    def attend(a: Coordination) -> Any:
        try:
            return meet(a)
        except Died:
            return "died"
        except CheckpointError as error:
            return error

    found = outcomes([lambda a=a: attend(a) for a in all_ranks])
    others = [result for rank, result in enumerate(found) if rank != victim]
    has_brought = watched.requests[f"set {victim}"] > 0
    assert has_brought == (lives > 0) or victim != 3
    if has_brought:
        assert others == [list(range(WORLD))] * 4
    else:
        error = same_error(others, RankMissingError)
        assert f"of rank {victim}" in error.found
        assert not any(f"rank {rank}" in error.found for rank in range(WORLD) if rank != victim)
        assert found[victim] == "died"


@pytest.mark.parametrize("at", [0, 1, 3], ids=["root", "inner", "leaf"])
@pytest.mark.parametrize(
    ("raised", "kind"), [(trouble(7), KeyMismatchError), (ZeroDivisionError("oops"), RankFailedError)]
)
def test_an_error_of_who_combines_is_everyones(
    at: int, raised: Exception, kind: type[CheckpointError], server: Server, small_tree: None
) -> None:
    def bring(a: Coordination) -> Any:
        def combine(messages: list[Any]) -> Any:
            if a.rank == at:
                raise raised
            return joined(messages)

        return a.meet(Asked("commit", [a.rank], len, combine))

    error = same_error(outcomes([lambda a=a: bring(a) for a in ranks(server)]), kind)
    assert error.rank == (at if kind is RankFailedError else 7)


def test_messages_that_become_too_large_together_are_an_error_of_everyone(server: Server, small_tree: None) -> None:
    def bring(a: Coordination) -> Any:
        return a.meet(Asked("commit", "x" * (5 << 20), len, "".join))

    error = outcomes([lambda a=a: bring(a) for a in ranks(server)])
    assert "at most" in str(same_error(error, type(error[0])))


def test_an_error_is_heard_at_once_though_others_never_come(server: Server, small_tree: None) -> None:
    present = [a for a in ranks(server) if a.rank not in (2, 3)]

    def bring(a: Coordination) -> Any:
        return a.meet(Asked("commit", trouble(4) if a.rank == 4 else [a.rank], len))

    assert same_error(outcomes([lambda a=a: bring(a) for a in present]), KeyMismatchError).rank == 4


def test_who_combines_for_long_is_not_silent(server: Server, small_tree: None) -> None:
    def bring(a: Coordination) -> Any:
        def combine(messages: list[Any]) -> Any:
            time.sleep(2.0 if a.rank == 1 else 0.0)
            return joined(messages)

        return a.meet(Asked("commit", [a.rank], len, combine))

    assert outcomes([lambda a=a: bring(a) for a in ranks(server, 0.6)]) == [WORLD] * WORLD


def saved(world: int) -> list[Counter[str]]:
    """Requests of each rank of a sequence with one meeting: all in one process, children before their parents."""
    common = dist.HashStore()
    common.set_timeout(timedelta(seconds=AMPLE))
    stores = [Watched(common) for _ in range(world)]

    def run(rank: int) -> None:
        a = Coordination("save", rank, world, AMPLE, stores[rank])
        assert a.meet(Asked("commit", [rank], len)) == world
        a.end()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for rank in reversed(range(world)):
        below = [f"save/1/{protocol.message_of(child)}" for child in protocol.children_of(rank, world)]
        while below and not common.check(below):
            time.sleep(0.001)
        threads[rank].start()
    for thread in threads:
        thread.join()
    return [store.requests for store in stores]


@pytest.fixture
def small_stacks() -> Iterator[None]:
    before = threading.stack_size(1 << 20)
    yield
    threading.stack_size(before)


def common(requests: Counter[str], rank: int) -> Counter[str]:
    """What every leaf asks: its own key by one name, without what the last one does, and what time does."""
    named = {what.replace(f"set {rank}", "set message"): count for what, count in requests.items()}
    return Counter({what: count for what, count in named.items() if what not in ("set left", "add beats")})


def test_requests_of_a_rank_do_not_depend_on_the_number_of_ranks(
    small_stacks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordination, "_spent", {})  # what other tests have left is deleted with what follows
    (_, leaf), many = saved(2), saved(1024)
    assert Counter(what.partition(" ")[0] for what in common(leaf, 1).elements()) == {
        "set": 1,  # its message
        "wait": 1,
        "get": 1,
        "add": 1,
    }
    for rank, requests in enumerate(many[33:], 33):
        assert common(requests, rank) == common(leaf, 1)
    # Those with children look for messages while they wait: how often is a matter of time, not of ranks.
    others = [
        sum(n for what, n in requests.items() if what.split()[0] != "check" and what != "add beats")
        for requests in many[:33]
    ]
    assert max(others) <= leaf.total() + ARITY + 6


@pytest.mark.parametrize(
    ("world", "limit", "pause"), [(2, 120.0, 5.0), (5000, 120.0, 5.0), (16384, 120.0, 15.0), (16384, 600.0, 16.384)]
)
def test_heartbeats_are_given_more_seldom_the_more_ranks_there_are(world: int, limit: float, pause: float) -> None:
    assert Heartbeats(None, "save", limit, 1800.0, world)._pause == pause


def test_a_missing_leaf_of_a_large_job_is_found_without_asking_for_everybody() -> None:
    common, world, missing = dist.HashStore(), 1024, 700
    for rank in range(1, world):
        if rank not in (missing, (missing - 1) // ARITY):
            common.set(f"save/1/{protocol.message_of(rank)}", "[]")
    for rank in (0, (missing - 1) // ARITY):
        common.set(f"save/1/{protocol.here(rank)}", "")
    store = Watched(common)
    a = Coordination("save", 1, world, 0.1, store)
    with patch.object(meeting, "GRACE", 0.1), pytest.raises(RankMissingError, match=f"no sign of rank {missing}[.]"):
        a.meet(Asked("commit", [], len))
    assert store.requests.total() < 40 + 4 * ARITY
