# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Meetings over a real store, with threads as ranks: the same answer or the same error everywhere, in time."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from mbridge_fsdp_ckpt.coordination import heartbeat, meeting, protocol
from mbridge_fsdp_ckpt.coordination.coordination import Coordination, next_coordination
from mbridge_fsdp_ckpt.errors import (
    CheckpointError,
    ConfigurationError,
    KeyMismatchError,
    RankFailedError,
    RankMissingError,
    StorageError,
)
from tests.unit.rounds import Asked

AMPLE = 300.0  # a limit that no test waits for; the machine may be busy
SOON = 60.0  # seconds in which what needs no waiting is over


class Server:
    """A store with one connection a rank."""

    def __init__(self, ranks: int) -> None:
        self.server: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._connections = [self._connect() for _ in range(ranks)]
        self._sequences = 0

    def _connect(self) -> Any:
        return dist.TCPStore(
            "127.0.0.1", self.server.port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False
        )

    def connection(self, rank: int) -> Any:
        """A rank's."""
        return self._connections[rank]

    def ranks(self, world_size: int, time_limit: float = AMPLE, storage_limit: float = AMPLE) -> list[Coordination]:
        """One coordination a rank, under a new name."""
        self._sequences += 1
        name = f"test{self._sequences}"
        connections = zip(range(world_size), self._connections, strict=False)
        return [Coordination(name, rank, world_size, time_limit, store, storage_limit) for rank, store in connections]


@pytest.fixture(scope="module")
def server() -> Server:
    return Server(4)


@pytest.fixture(autouse=True)
def short_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 does not wait long for ranks that a test leaves out."""
    monkeypatch.setattr(meeting, "_LAST_WORD", 0.2)


@pytest.fixture
def mortal_meeting() -> Server:
    return Server(3)


def outcomes(actions: Sequence[Callable[..., Any]]) -> list[Any]:
    """Run each in a thread; what it returned or raised."""

    def attempt(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(actions)) as pool:
        return list(pool.map(attempt, actions))


def same_error(found: list[Any], kind: type[CheckpointError]) -> CheckpointError:
    """The error that all of them are."""
    assert {type(error) for error in found} == {kind}
    assert len({str(error) for error in found}) == 1
    first: CheckpointError = found[0]
    return first


def meet(a: Coordination, phase: str, message: Any, decide: Callable[[list[Any]], Any]) -> Any:
    """A meeting at which the coordinator gets all messages, by rank."""
    brought = message if isinstance(message, CheckpointError) else [[a.rank, message]]
    return a.meet(Asked(phase, brought, lambda whole: decide([one for _, one in sorted(whole)])))


def trouble(rank: int) -> CheckpointError:
    return KeyMismatchError(expected="keys", found="none", remedy="Look.", rank=rank, key="weight")


def test_everyone_gets_the_judges_answer_in_order_of_rank(server: Server) -> None:
    def decide(messages: list[Any]) -> Any:
        return {"messages": messages, "decided by": threading.get_ident()}

    ranks = server.ranks(4)
    found = outcomes([lambda a=a: meet(a, "count", {"rank": a.rank}, decide) for a in ranks])
    assert found[0]["messages"] == [{"rank": r} for r in range(4)]
    assert found == [found[0]] * 4


def test_meetings_follow_one_another(server: Server) -> None:
    def rounds(a: Coordination) -> list[Any]:
        return [meet(a, f"round {n}", [n, a.rank], lambda messages: messages) for n in range(5)]

    found = outcomes([lambda a=a: rounds(a) for a in server.ranks(3)])
    assert found == [[[[n, 0], [n, 1], [n, 2]] for n in range(5)]] * 3


def test_nothing_but_the_decisions_stays_in_the_store(server: Server) -> None:
    before, ranks = server.server.num_keys(), server.ranks(4)
    outcomes([lambda a=a: meet(a, "once", "x" * 1000, len) for a in ranks])
    assert not any(server.server.check([f"{ranks[0].name}/1/{rank}"]) for rank in range(4))
    assert server.server.check([f"{ranks[0].name}/1/decision"])
    assert server.server.num_keys() - before <= 4  # decision, outcome, arrivals, heartbeats


@pytest.mark.parametrize("size", [0, 1 << 10, 1 << 20, 4 << 20])
def test_messages_of_any_size_arrive(server: Server, size: int) -> None:
    ranks = server.ranks(2)
    found = outcomes([lambda a=a: a.meet(Asked("size", "x" * size, str, lambda messages: messages[-1])) for a in ranks])
    assert [len(answer) for answer in found] == [size] * 2


def test_a_message_too_large_for_the_store_is_an_error_of_everyone(mortal_meeting: Server) -> None:
    """The store takes 8 MiB, and closes the connection of who sends more: this job could never meet again."""
    ranks = mortal_meeting.ranks(2, time_limit=5.0)
    found = outcomes([lambda a=a: meet(a, "size", "x" * (9 << 20) * a.rank, len) for a in ranks])
    assert isinstance(found[0], CheckpointError)
    assert not isinstance(same_error(found, type(found[0])), RankMissingError)
    assert outcomes([lambda a=a: meet(a, "size", "x", len) for a in ranks]) == [2, 2]


@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_of_one_rank_is_everyones_without_waiting_for_who_never_comes(server: Server, failing: int) -> None:
    present = [a for a in server.ranks(4) if a.rank != 1]
    begin = time.monotonic()
    actions = [lambda a=a: meet(a, "plan", trouble(a.rank) if a.rank == failing else {}, len) for a in present]
    error = same_error(outcomes(actions), KeyMismatchError)
    assert time.monotonic() - begin < SOON
    assert (error.rank, error.key, error.remedy) == (failing, "weight", "Look.")


def test_of_several_errors_all_raise_one(server: Server) -> None:
    found = outcomes([lambda a=a: meet(a, "plan", trouble(a.rank), len) for a in server.ranks(3)])
    same_error(found, KeyMismatchError)


def test_a_missing_rank_is_named_by_all_others(server: Server) -> None:
    ranks = server.ranks(4, time_limit=1.0)
    found = outcomes([lambda a=a: meet(a, "plan", {}, len) for a in ranks if a.rank not in (1, 3)])
    error = same_error(found, RankMissingError)
    assert "rank 1, 3" in error.found
    assert "'plan' within 1 s" in error.expected


def test_a_missing_decide_is_named(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "GRACE", 0.2)
    ranks = server.ranks(3, time_limit=0.5)
    error = same_error(outcomes([lambda a=a: meet(a, "plan", {}, len) for a in ranks[1:]]), RankMissingError)
    assert "no sign of rank 0" in error.found


def test_a_rank_that_comes_after_the_limit_gets_the_same_error(server: Server) -> None:
    decide, late = server.ranks(2, time_limit=0.3)
    found = outcomes([lambda: meet(decide, "plan", {}, len)]) + outcomes([lambda: meet(late, "plan", {}, len)])
    assert "rank 1" in same_error(found, RankMissingError).found


def test_a_decide_that_comes_after_the_limit_gets_the_same_error(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "GRACE", 0.2)
    late, *waiting = server.ranks(3, time_limit=0.3)
    decided: list[Any] = []
    found = outcomes([lambda a=a: meet(a, "plan", {}, len) for a in waiting])
    found += outcomes([lambda: meet(late, "plan", {}, decided.append)])
    assert "no sign of rank 0" in same_error(found, RankMissingError).found


@pytest.mark.parametrize("fenced", [False, True])
def test_nobody_commits_what_others_gave_up_and_nobody_gives_up_what_is_fenced(
    server: Server, monkeypatch: pytest.MonkeyPatch, fenced: bool
) -> None:
    monkeypatch.setattr(meeting, "GRACE", 1.0)
    ranks = server.ranks(3, time_limit=1.0, storage_limit=0.1)
    done: list[str] = []

    def decide(messages: list[Any]) -> str:
        time.sleep(1.0)
        if fenced:
            ranks[0].fence()
        time.sleep(1.6)  # the others' limit, but not that of what is fenced, is over
        ranks[0].fence()
        done.append("committed")
        return "committed"

    found = outcomes([lambda a=a: meet(a, "commit", {}, decide) for a in ranks])
    if fenced:
        assert found == ["committed"] * 3
    else:
        assert "no decision of rank 0" in same_error(found, RankMissingError).found
        assert done == []
        assert [a.was_fenced() for a in ranks] == [False] * 3


def test_a_decide_that_stalls_after_the_fence_is_named(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "GRACE", 0.2)
    decide, waiting = server.ranks(2, time_limit=0.3, storage_limit=0.1)

    def stall(messages: list[Any]) -> None:
        decide.fence()
        time.sleep(2.0)

    with ThreadPoolExecutor() as pool:
        stalled = pool.submit(meet, decide, "commit", {}, stall)
        with pytest.raises(RankMissingError, match="check whether the checkpoint is in its place"):
            meet(waiting, "commit", {}, len)
        assert waiting.was_fenced(), "what the coordinator does must not be undone"
        assert stalled.result() is None


def test_many_missing_ranks_are_not_all_listed(server: Server) -> None:
    alone = server.ranks(100, 0.1)[0]
    with pytest.raises(RankMissingError) as caught:
        meet(alone, "plan", {}, len)
    assert caught.value.found.endswith("31, 32, ...")


def test_an_error_the_decide_raises_is_everyones(server: Server) -> None:
    def decide(messages: list[Any]) -> Any:
        raise trouble(7)

    found = outcomes([lambda a=a: meet(a, "plan", {}, decide) for a in server.ranks(3)])
    assert same_error(found, KeyMismatchError).rank == 7


@pytest.mark.parametrize(
    ("raised", "kind"), [(ZeroDivisionError("oops"), RankFailedError), (OSError(28, "No space left"), StorageError)]
)
def test_any_failure_of_the_decide_is_everyones(server: Server, raised: Exception, kind: type[CheckpointError]) -> None:
    def decide(messages: list[Any]) -> Any:
        raise raised

    found = outcomes([lambda a=a: meet(a, "the plan", {}, decide) for a in server.ranks(2)])
    error = same_error(found, kind)
    assert error.rank == 0
    assert "the plan" in error.expected
    assert str(raised) in error.found


def test_a_rank_that_fails_at_its_own_message_keeps_nobody_waiting(server: Server) -> None:
    class Failing(Asked):
        def message(self) -> Any:
            return 1 // self.brought

    found = outcomes([lambda a=a: a.meet(Failing("the plan", a.rank, len)) for a in server.ranks(3)])
    error = same_error(found, RankFailedError)
    assert (error.rank, "by zero" in error.found) == (0, True)


def test_an_answer_that_cannot_be_sent_is_an_error_of_everyone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "GRACE", 0.2)
    found = outcomes([lambda a=a: meet(a, "plan", {}, lambda m: object()) for a in server.ranks(2, 1.0)])
    assert isinstance(found[0], CheckpointError)
    same_error(found, type(found[0]))
    assert not isinstance(found[0], RankMissingError)


class Clock:
    """A clock that stands still while anybody works: only sleeping in the thread that made it moves it on."""

    def __init__(self) -> None:
        self.now, self._thread = 0.0, threading.get_ident()
        self.events: list[tuple[float, Callable[[], Any]]] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if threading.get_ident() != self._thread:
            time.sleep(0.01)
            return
        self.now += seconds
        while self.events and self.events[0][0] <= self.now:
            self.events.pop(0)[1]()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    monkeypatch.setattr(meeting, "time", clock)
    return clock


def test_heartbeats_extend_the_limit(server: Server, clock: Clock) -> None:
    waiting, working = server.ranks(2, time_limit=10.0)
    arrival = threading.Thread(target=lambda: meet(working, "write", "done", len))
    clock.events = [(float(second), working.heartbeat) for second in range(4, 100, 4)] + [(102.0, arrival.start)]
    clock.events.append((103.0, lambda: time.sleep(1)))
    assert meet(waiting, "write", "done", lambda messages: messages) == ["done", "done"]
    arrival.join()
    assert 102 <= clock.now < 113


def test_without_heartbeats_the_limit_ends_the_wait(server: Server, clock: Clock) -> None:
    waiting, working = server.ranks(2, time_limit=10.0)
    clock.events = [(float(second), working.heartbeat) for second in (4, 8, 12)]
    with pytest.raises(RankMissingError, match="rank 1"):
        meet(waiting, "write", "done", len)
    assert 22 <= clock.now < 25


def test_heartbeats_are_sent_seldom(server: Server, clock: Clock) -> None:
    working = server.ranks(2, time_limit=80.0)[1]
    for _ in range(1000):
        clock.now += 0.1
        working.heartbeat()
    assert 15 <= int(server.server.add(f"{working.name}/beats", 0)) <= 20


def test_a_rank_inside_one_long_call_is_not_silent(server: Server) -> None:
    waiting, working = server.ranks(2, time_limit=0.8)

    def work() -> Any:
        with working.at_work():
            time.sleep(2.0)
        return meet(working, "write", "done", len)

    assert outcomes([lambda: meet(waiting, "write", "done", len), work]) == [2, 2]


def test_a_decide_inside_one_long_call_is_not_silent(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "GRACE", 0.0)
    ranks = server.ranks(3, time_limit=0.8)

    def decide(messages: list[Any]) -> str:
        time.sleep(2.0)
        ranks[0].fence()
        time.sleep(2.0)
        return "committed"

    assert outcomes([lambda a=a: meet(a, "commit", {}, decide) for a in ranks]) == ["committed"] * 3


def test_a_rank_inside_a_call_that_never_returns_is_named(server: Server) -> None:
    waiting, stuck = server.ranks(2, time_limit=0.4, storage_limit=0.8)
    named = threading.Event()

    def hang() -> bool:
        with stuck.at_work():
            return named.wait(SOON)

    def wait() -> None:
        try:
            meet(waiting, "write", "done", len)
        finally:
            named.set()

    raised, was_named = outcomes([wait, hang])
    assert was_named
    assert "rank 1" in same_error([raised], RankMissingError).found


def test_steps_keep_the_pulse_of_work_that_takes_longer_than_the_storage_limit(server: Server) -> None:
    waiting, working = server.ranks(2, time_limit=0.4, storage_limit=0.8)

    def work() -> Any:
        with working.at_work():
            for _ in range(6):
                time.sleep(0.5)
                working.heartbeat()
        return meet(working, "write", "done", len)

    assert outcomes([lambda: meet(waiting, "write", "done", len), work]) == [2, 2]


def test_rank_0_keeps_its_lease_while_it_waits(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_RENEWED", 0.2)
    waiting, working = server.ranks(2)
    renewed = threading.Event()
    waiting.on_heartbeat = renewed.set

    def work() -> Any:
        assert renewed.wait(SOON)
        return meet(working, "write", "done", len)

    assert outcomes([lambda: meet(waiting, "write", "done", len), work]) == [2, 2]


def test_who_only_waits_has_no_pulse(server: Server) -> None:
    """Two that wait would keep each other waiting."""
    first, second = server.ranks(3, time_limit=0.4)[:2]
    with first.at_work(), second.at_work():
        pass
    found = outcomes([lambda a=a: meet(a, "write", "done", len) for a in (first, second)])
    assert "rank 2" in same_error(found, RankMissingError).found


def test_a_pulse_ends_with_its_store(mortal_meeting: Server) -> None:
    working = mortal_meeting.ranks(2, time_limit=0.4)[1]
    with working.at_work():
        mortal_meeting.server = None
        time.sleep(0.5)
        assert not [thread for thread in threading.enumerate() if thread.name == "heartbeats"]
    with pytest.raises(RankMissingError, match="rendezvous store"):
        meet(working, "write", "done", len)


@pytest.mark.parametrize("fails", [False, True])
def test_rank_0_stays_until_its_last_word_is_read(server: Server, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    monkeypatch.setattr(meeting, "_LAST_WORD", SOON)
    leader, reader = server.ranks(2)
    left: list[bool] = []
    wait_for = meeting.wait_for

    def decide(messages: list[Any]) -> str:
        if fails:
            raise trouble(0)
        return "done"

    def whole(a: Coordination) -> Any:
        answer = meet(a, "commit", {}, decide)
        a.end()
        return answer

    def lead() -> Any:
        try:
            return whole(leader)
        finally:
            left.append(True)

    def late(store: Any, keys: list[str], seconds: float) -> bool:
        if keys[0].endswith("decision"):
            time.sleep(0.5)
            assert left == []
        return wait_for(store, keys, seconds)

    with patch.object(meeting, "wait_for", late):
        found = outcomes([lead, lambda: whole(reader)])
    if fails:
        same_error(found, KeyMismatchError)
    else:
        assert found == ["done", "done"]


def test_rank_0_does_not_wait_long_for_who_never_reads(server: Server) -> None:
    leader, other = server.ranks(2)
    server.server.set(f"{other.name}/1/{protocol.message_of(1)}", "[[1, {}]]")
    assert meet(leader, "commit", {}, len) == 2
    leader.end()


def test_what_was_read_holds_though_the_store_has_gone(mortal_meeting: Server) -> None:
    ranks = mortal_meeting.ranks(2)
    assert outcomes([lambda a=a: meet(a, "commit", {}, len) for a in ranks]) == [2, 2]
    mortal_meeting.server = None
    for a in ranks:
        a.end()


def test_a_dying_store_is_an_error_with_a_name(mortal_meeting: Server) -> None:
    ranks = mortal_meeting.ranks(3)
    killer = threading.Timer(0.5, lambda: setattr(mortal_meeting, "server", None))
    killer.start()
    found = outcomes([lambda a=a: meet(a, "plan", {}, len) for a in ranks[1:]])
    killer.join()
    assert [type(error) for error in found] == [RankMissingError] * 2
    assert [error.rank for error in found] == [1, 2]
    assert all("'plan'" in error.expected for error in found)


def test_a_store_that_is_dead_already_is_an_error_with_a_name(mortal_meeting: Server) -> None:
    ranks = mortal_meeting.ranks(2)
    mortal_meeting.server = None
    found = outcomes([lambda a=a: meet(a, "plan", {}, len) for a in ranks])
    assert [type(error) for error in found] == [RankMissingError] * 2


def test_a_single_rank_needs_no_store() -> None:
    alone = next_coordination("save")
    alone.heartbeat()
    assert (alone.rank, alone.world_size, alone.store) == (0, 1, None)
    assert meet(alone, "plan", {"a": 1}, lambda messages: messages) == [{"a": 1}]
    with pytest.raises(KeyMismatchError, match="rank 3"):
        meet(alone, "plan", trouble(3), len)
    with pytest.raises(RankFailedError, match="ZeroDivisionError"):
        meet(alone, "plan", {}, lambda messages: 1 // 0)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_limit_must_be_one_that_can_be_waited_for(limit: float) -> None:
    with pytest.raises(ConfigurationError, match="positive time limit"):
        next_coordination("save", limit)
    with pytest.raises(ConfigurationError, match="positive storage limit"):
        next_coordination("save", AMPLE, limit)
