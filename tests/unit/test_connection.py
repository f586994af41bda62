# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Requests to the store have a limit, whatever its host does; the name of a job is never an old one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from mbridge_fsdp_ckpt.coordination import incarnation
from mbridge_fsdp_ckpt.coordination.connection import Connection
from mbridge_fsdp_ckpt.coordination.incarnation import Incarnation, client
from tests.unit.test_coordination import outcomes

SERVE = """
import time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(1000)
"""
ASK = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from mbridge_fsdp_ckpt.coordination.incarnation import connection
store = connection("127.0.0.1", int(sys.argv[1]), 1000.0).within(1000.0)
store.set("asked", "")
print("asks", flush=True)
while True:
    store.check(["asked"])
"""


@contextmanager
def serving() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that serves a store, and its port."""
    with subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@pytest.fixture(scope="module")
def host() -> Iterator[tuple[subprocess.Popen[str], int]]:
    with serving() as found:
        yield found


def test_a_frozen_store_ends_requests_within_their_limit(host: tuple[subprocess.Popen[str], int]) -> None:
    process, port = host
    connection = Connection(lambda: client("127.0.0.1", port, 60.0))
    store = connection.within(60.0)
    store.set("a", "1")
    os.kill(process.pid, signal.SIGSTOP)
    for ask in (
        lambda store: store.get("a"),
        lambda store: store.check(["a"]),
        lambda store: store.wait(["a"], timedelta(seconds=0.1)),
    ):
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match=r"no answer within (0\.5|1\.6) s"):
            ask(connection.within(0.5))  # type: ignore[no-untyped-call]
        assert time.monotonic() - begin < 30
    assert not connection.usable
    with pytest.raises(TimeoutError):  # nor does a new connection wait for ever
        Connection(lambda: client("127.0.0.1", port, 60.0)).within(0.5).get("a")
    os.kill(process.pid, signal.SIGCONT)
    assert Connection(lambda: client("127.0.0.1", port, 60.0)).within(60.0).get("a") == b"1"


def test_a_store_that_wakes_up_within_the_limit_answers(host: tuple[subprocess.Popen[str], int]) -> None:
    process, port = host
    store = Connection(lambda: client("127.0.0.1", port, 60.0)).within(60.0)
    store.set("a", "1")
    os.kill(process.pid, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, [process.pid, signal.SIGCONT]).start()
    assert store.get("a") == b"1"


def test_control_c_ends_who_asks_a_frozen_store(host: tuple[subprocess.Popen[str], int]) -> None:
    process, port = host
    with subprocess.Popen(
        [sys.executable, "-c", ASK, str(port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as asking:
        assert asking.stdout is not None
        assert asking.stdout.readline() == "asks\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.5)
        asking.send_signal(signal.SIGINT)
        try:
            _, said = asking.communicate(timeout=60)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert "KeyboardInterrupt" in said


def test_a_connection_that_fails_names_what_torch_said() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    connection = Connection(lambda: client("127.0.0.1", port, 0.5))
    for _ in range(2):
        with pytest.raises(dist.DistError):
            connection.within(60.0).get("a")
    assert not connection.usable


def _connections() -> int:
    return sum(thread.name == "rendezvous store" for thread in threading.enumerate())


def test_a_connection_that_nobody_has_any_more_ends_its_thread() -> None:
    """As those of an earlier incarnation, and those that were given up."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = _connections()
    connections = [Connection(lambda: client("127.0.0.1", store.port, 5.0)) for _ in range(3)]
    assert [connection.within(5.0).add("a", 1) for connection in connections] == [1, 2, 3]
    assert _connections() == before + 3
    connections.clear()
    deadline = time.monotonic() + 10.0
    while _connections() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


NAME = """
import threading, time, weakref
import torch.distributed as dist
from mbridge_fsdp_ckpt.coordination.connection import Connection
from mbridge_fsdp_ckpt.coordination.incarnation import _Naming
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
class Group: pass
dist.group.WORLD = group = Group()
naming = _Naming("a/b", weakref.ref(group), {1}, Connection(store.clone))
threading.Thread(target=naming.serve, daemon=True).start()
time.sleep(1.0)
raise SystemExit(3)
"""


def test_a_program_ends_with_its_own_status_while_its_name_is_still_to_be_told() -> None:
    found = subprocess.run([sys.executable, "-c", NAME], capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 3, found.stderr


class Group:
    """In the place of a process group."""


def job(server: Any, rank: int, world_size: int, group: Group) -> Incarnation:
    """A rank's, in a store that it shares with others."""
    found = Incarnation.__new__(Incarnation)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_rank", lambda: rank)
        patch.setattr(dist, "get_world_size", lambda: world_size)
        patch.setattr(incarnation, "default_store", lambda: dist.PrefixStore("job", server))
        found.__init__(group)  # type: ignore[misc]
    return found


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Group:
    group = Group()
    monkeypatch.setattr(type(dist.group), "WORLD", group, raising=False)
    return group


def test_a_store_with_what_an_earlier_incarnation_left_gives_a_new_name(
    live: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 of the earlier one asked and died; rank 0's thread still waits for it."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = [job(server, rank, 3, live) for rank in range(2)]
    old = outcomes([lambda one=one: one.name(30.0) for one in before])
    assert len(set(old)) == 1
    left = dist.PrefixStore("job", server)
    left.queue_push("mbridge_fsdp_ckpt/asked", json.dumps([2, "dead"]))
    left.queue_push("mbridge_fsdp_ckpt/asked", json.dumps([2, old[0]]))
    left.set(f"{old[0]}/call/now", "[1]")
    group = Group()
    monkeypatch.setattr(type(dist.group), "WORLD", group, raising=False)
    now = [job(server, rank, 2, group) for rank in range(2)]
    new = outcomes([lambda one=one: one.name(30.0) for one in now])
    assert len(set(new)) == 1
    assert new[0] != old[0]


def test_the_thread_of_an_earlier_incarnation_hands_on_what_the_next_one_asks(
    live: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    zero = job(server, 0, 2, live)
    old = zero.name(30.0)
    other = Group()
    monkeypatch.setattr(type(dist.group), "WORLD", other, raising=False)
    rank_1 = job(server, 1, 2, other)
    asking: list[Any] = []
    thread = threading.Thread(target=lambda: asking.extend(outcomes([lambda: rank_1.name(30.0)])))
    thread.start()
    time.sleep(0.5)
    new = job(server, 0, 2, other).name(30.0)
    thread.join()
    assert asking == [new]
    assert new != old


def test_a_rank_that_asks_once_rank_0_has_left_its_group_is_told(live: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """An asynchronous save may outlast the group, to which others still refer."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    zero, one = (job(server, rank, 2, live) for rank in range(2))
    monkeypatch.setattr(type(dist.group), "WORLD", None, raising=False)
    name = zero.name(30.0)
    time.sleep(0.5)
    assert outcomes([lambda: one.name(10.0)]) == [name]
