# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What processes of one host share in memory: real processes, real locks, real deaths."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbridge_fsdp_ckpt.errors import ManifestError
from mbridge_fsdp_ckpt.format.reader import SafeSource
from mbridge_fsdp_ckpt.io import shared
from mbridge_fsdp_ckpt.io.ranges import Bytes
from mbridge_fsdp_ckpt.io.shared import once_a_host
from mbridge_fsdp_ckpt.opening import open_safe
from tests.unit import handmade

FORK = multiprocessing.get_context("fork")
PARTS = [np.arange(100_000, dtype=np.uint8), np.zeros(0, dtype=np.uint8), np.full(7, 3, dtype=np.uint8)]
WHOLE = b"".join(part.tobytes() for part in PARTS)

Parts = Callable[[], Iterator[Bytes]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of /dev/shm, which other tests use meanwhile; on a host of several ranks."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(shared, "FOLDER", folder)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    return folder


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    """Reads `PARTS`, and leaves a line in `tmp_path / "reads"` each time."""

    def read() -> Iterator[Bytes]:
        with (tmp_path / "reads").open("a") as file:
            file.write(f"{os.getpid()}\n")
        yield from PARTS

    return read


def reads(tmp_path: Path) -> int:
    return len((tmp_path / "reads").read_text().splitlines())


def never() -> Iterator[Bytes]:
    raise AssertionError("read a second time")


def unreadable() -> Iterator[Bytes]:
    yield PARTS[0]
    raise ManifestError(expected="a", found="b", remedy="c")


@contextmanager
def process(body: Callable[[Connection[Any, Any]], None]) -> Iterator[tuple[Connection[Any, Any], ForkProcess]]:
    """Another process that talks to this one."""
    ours, theirs = FORK.Pipe()
    other = FORK.Process(target=body, args=(theirs,))
    other.start()
    theirs.close()
    try:
        yield ours, other
    finally:
        ours.close()
        other.kill()
        other.join()


def holder(parts: Parts) -> Callable[[Connection[Any, Any]], None]:
    """A process that sends what it got, and holds it until it is told to let go."""

    def body(connection: Connection[Any, Any]) -> None:
        found = once_a_host("these", parts)
        connection.send(None if found is None else found.tobytes())
        connection.recv()
        del found
        connection.send("gone")

    return body


def stuck(connection: Connection[Any, Any]) -> None:
    """A process that says so in the middle of reading, and reads no further."""

    def read() -> Iterator[Bytes]:
        yield PARTS[0]
        connection.send("reading")
        connection.recv()

    once_a_host("these", read)


def test_the_first_reads_for_all_and_the_last_removes_the_file(folder: Path, parts: Parts, tmp_path: Path) -> None:
    with process(holder(parts)) as (a, _), process(holder(parts)) as (b, _), process(holder(parts)) as (c, _):
        assert [one.recv() for one in (a, b, c)] == [WHOLE] * 3
        assert reads(tmp_path) == 1
        for one in (a, b):
            one.send("let go")
            assert one.recv() == "gone"
            [file] = folder.iterdir()
            assert file.stat().st_mode & 0o777 == 0o600
        c.send("let go")
        assert c.recv() == "gone"
        assert list(folder.iterdir()) == []


def test_what_is_shared_cannot_be_written(folder: Path, parts: Parts) -> None:
    found = once_a_host("these", parts)
    assert found is not None
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1


def test_other_bytes_are_not_these(folder: Path, parts: Parts, tmp_path: Path) -> None:
    found = once_a_host("these", parts), once_a_host("others", parts)
    assert [None if one is None else one.tobytes() for one in found] == [WHOLE, WHOLE]
    assert reads(tmp_path) == 2


def test_after_a_death_in_the_middle_the_next_one_reads(folder: Path, parts: Parts, tmp_path: Path) -> None:
    with process(stuck) as (first, dying), process(holder(parts)) as (next_one, _):
        assert first.recv() == "reading"
        assert not next_one.poll(0.1)
        os.kill(dying.pid or 0, signal.SIGKILL)
        assert next_one.recv() == WHOLE
        next_one.send("let go")
        assert next_one.recv() == "gone"
    assert (reads(tmp_path), list(folder.iterdir())) == (1, [])


def test_nobody_waits_beyond_the_limit(folder: Path) -> None:
    """And who waits leaves the job's random numbers as they were: they are part of what a load restores."""
    with process(stuck) as (first, _):
        assert first.recv() == "reading"
        before = random.getstate()
        assert once_a_host("these", never, wait_limit=0.1) is None
        assert random.getstate() == before
        assert len(list(folder.iterdir())) == 1


def test_what_the_killed_left_is_removed_by_the_next(folder: Path, parts: Parts) -> None:
    with process(holder(parts)) as (connection, killed):
        assert connection.recv() == WHOLE
        os.kill(killed.pid or 0, signal.SIGKILL)
        killed.join()
    assert len(list(folder.iterdir())) == 1
    found = once_a_host("others", parts)
    assert found is not None
    assert len(list(folder.iterdir())) == 1
    del found
    assert list(folder.iterdir()) == []


def test_what_the_killed_left_is_read_anew(folder: Path, parts: Parts) -> None:
    with process(holder(parts)) as (connection, killed):
        assert connection.recv() == WHOLE
        os.kill(killed.pid or 0, signal.SIGKILL)
        killed.join()
    found = once_a_host("these", lambda: iter(PARTS[2:]))
    assert found is not None
    assert found.tobytes() == PARTS[2].tobytes()


def test_bytes_that_changed_meanwhile_are_not_used(folder: Path, parts: Parts) -> None:
    found = once_a_host("these", parts)
    [file] = folder.iterdir()
    with file.open("r+b") as content:
        content.write(b"\xff")
    assert once_a_host("these", never) is None
    del found
    assert list(folder.iterdir()) == []


def _left_open(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    file.chmod(0o644)


def _foreign(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    file.chmod(0o600)
    os.chown(file, 12345, -1)


def _link(file: Path, data: bytes) -> None:
    _private(file.parent / "target", data)
    file.symlink_to(file.parent / "target")


def _hard_link(file: Path, data: bytes) -> None:
    _private(file.parent / "target", data)
    file.hardlink_to(file.parent / "target")


def _private(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    file.chmod(0o600)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.mark.parametrize(
    "make", [_left_open, _link, _hard_link, pytest.param(_foreign, marks=needs_root)], ids=lambda make: make.__name__
)
@pytest.mark.parametrize("complete", [True, False])
def test_what_others_could_have_written_is_not_used(
    make: Callable[[Path, bytes], None], complete: bool, folder: Path, parts: Parts
) -> None:
    found = once_a_host("these", parts)
    [file] = folder.iterdir()
    data = file.read_bytes() if complete else b"something else"
    del found
    make(file, data)
    assert once_a_host("these", never) is None
    assert file.read_bytes() == data


def test_a_private_file_of_that_name_is_used(folder: Path, parts: Parts) -> None:
    """So that the cases above fail for what they are about."""
    found = once_a_host("these", parts)
    [file] = folder.iterdir()
    data = file.read_bytes()
    del found
    _private(file, data)
    assert once_a_host("these", parts) is not None
    assert not file.exists()


def test_too_little_memory_is_left_alone(folder: Path) -> None:
    much = np.broadcast_to(np.zeros(1, dtype=np.uint8), (1 << 50,))
    assert once_a_host("these", lambda: iter([PARTS[0], much])) is None
    assert list(folder.iterdir()) == []


def test_memory_that_refuses_is_left_alone(folder: Path, parts: Parts) -> None:
    def body(connection: Connection[Any, Any]) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(PARTS[0]) // 2, resource.RLIM_INFINITY))
        connection.send(once_a_host("these", parts))

    with process(body) as (connection, _):
        assert connection.recv() is None
    assert list(folder.iterdir()) == []


def test_without_such_memory_each_reads_for_itself(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "FOLDER", tmp_path / "absent")
    assert once_a_host("these", never) is None


@pytest.mark.parametrize("ranks", [None, "1"])
def test_a_rank_alone_shares_nothing(ranks: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE") if ranks is None else monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert once_a_host("these", never) is None
    assert list(folder.iterdir()) == []


def test_what_the_first_cannot_read_is_its_error_and_leaves_nothing(folder: Path) -> None:
    with pytest.raises(ManifestError):
        once_a_host("these", unreadable)
    assert list(folder.iterdir()) == []


def test_who_waited_for_a_first_that_failed_reads_for_itself(folder: Path) -> None:
    def failing(connection: Connection[Any, Any]) -> None:
        def read() -> Iterator[Bytes]:
            connection.send("reading")
            connection.recv()
            yield from unreadable()

        with pytest.raises(ManifestError):
            once_a_host("these", read)

    with process(failing) as (first, _), process(holder(never)) as (waiting, _):
        assert first.recv() == "reading"
        assert not waiting.poll(0.1)
        first.send("fail")
        assert waiting.recv() is None
    assert list(folder.iterdir()) == []


def test_a_forked_process_lets_its_parent_keep_the_file(folder: Path, parts: Parts) -> None:
    held = [once_a_host("these", parts)]

    def body(connection: Connection[Any, Any]) -> None:
        held.clear()
        connection.send("gone")

    with process(body) as (connection, _):
        assert connection.recv() == "gone"
    assert len(list(folder.iterdir())) == 1
    held.clear()
    assert list(folder.iterdir()) == []


def seen(source: SafeSource) -> list[Any]:
    """What a load may ask of the index, as another process can be told."""
    chunks = [c for of_key in source.chunks(list(source.metadata.keys)).values() for c in of_key]
    return [source.index.entries(), source.share(0, 1), [(c.key, c.box, c.path.name, c.record, c.data) for c in chunks]]


def opening(directory: Path, near: int) -> Callable[[Connection[Any, Any]], None]:
    """A rank of a load in another layout: sends its view of the index, or the error."""

    def body(connection: Connection[Any, Any]) -> None:
        source = SafeSource(directory, [near])
        try:
            connection.send(seen(source))
        except ManifestError as error:
            connection.send(str(error))
        connection.recv()

    return body


def test_ranks_of_a_host_read_the_index_once(folder: Path, tmp_path: Path) -> None:
    directory = handmade.make(tmp_path / "iter_0000010")
    expected = seen(open_safe(directory, remedy=""))
    assert list(folder.iterdir()) == [], "a tool shares nothing"
    with process(opening(directory, near=8)) as (first, _):
        assert first.recv() == expected
        group = directory / handmade.GROUP
        damaged = bytearray(group.read_bytes())
        damaged[40] ^= 1  # in the metadata: rows are read by each rank that needs them
        group.write_bytes(damaged)
        with process(opening(directory, near=9)) as (second, _):
            assert second.recv() == expected


def test_a_damaged_index_is_the_same_error_on_every_rank(folder: Path, tmp_path: Path) -> None:
    directory = handmade.make(tmp_path / "iter_0000010")
    group = directory / handmade.GROUP
    damaged = bytearray(group.read_bytes())
    damaged[40] ^= 1
    group.write_bytes(damaged)
    with process(opening(directory, 8)) as (a, _), process(opening(directory, 9)) as (b, _):
        one, other = a.recv(), b.recv()
    assert one == other
    assert "the header and directory that their checksum covers" in one
    assert list(folder.iterdir()) == []


def test_a_source_that_nobody_refers_to_lets_go_at_once(folder: Path, tmp_path: Path) -> None:
    source: SafeSource | None = SafeSource(handmade.make(tmp_path / "iter_0000010"), near=[8])
    assert source is not None
    assert source.index.count == len(handmade.KEYS)
    assert len(list(folder.iterdir())) == 1
    source = None
    assert list(folder.iterdir()) == []
