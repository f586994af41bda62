# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What is read ahead is what the file has, in whatever order and pieces it is asked for."""

from __future__ import annotations

import errno
import gc
import hashlib
import math
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mbridge_fsdp_ckpt.errors import DamagedCheckpointError
from mbridge_fsdp_ckpt.io import prefetch, reading
from mbridge_fsdp_ckpt.io.checksums import Hasher, checksum
from mbridge_fsdp_ckpt.io.prefetch import FEW, LATE, MANY, REQUEST, Range, requests_for
from mbridge_fsdp_ckpt.io.ranges import OpenFiles, Scratch
from mbridge_fsdp_ckpt.io.store import as_path

PAGE = reading.ALIGNED
SIZE = 11 * REQUEST + 777
A, B = Path("a"), Path("b")


@pytest.fixture(scope="module")
def content() -> bytes:
    return hashlib.shake_128(b"seed").digest(SIZE)


@pytest.fixture(params=["in the cache", "on disk"])
def path(request: pytest.FixtureRequest, tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        if request.param == "on disk":
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("reading")]


@pytest.mark.parametrize(
    ("ranges", "requests", "first"),
    [
        ([], [], []),
        ([(A, 0, 0)], [], [0]),
        ([(A, 5, 1)], [(A, 0, PAGE)], [0]),
        ([(A, 0, 10), (A, 10, 20)], [(A, 0, PAGE)], [0, 0]),
        ([(A, 0, 10), (A, PAGE, 1)], [(A, 0, 2 * PAGE)], [0, 0]),
        ([(A, 0, 10), (A, 1 << 30, 1)], [(A, 0, PAGE), (A, 1 << 30, PAGE)], [0, 1]),
        ([(A, 0, 10), (B, 10, 1)], [(A, 0, PAGE), (B, 0, PAGE)], [0, 1]),
        ([(A, PAGE, 1), (A, 0, 1)], [(A, PAGE, PAGE), (A, 0, PAGE)], [0, 1]),
        (
            [(A, PAGE + 1, 2 * REQUEST), (A, PAGE + 1 + 2 * REQUEST, PAGE)],
            [(A, PAGE, REQUEST), (A, PAGE + REQUEST, REQUEST), (A, PAGE + 2 * REQUEST, 2 * PAGE)],
            [0, 2],
        ),
        ([(A, 0, REQUEST), (A, REQUEST, 1)], [(A, 0, REQUEST), (A, REQUEST, PAGE)], [0, 1]),
    ],
)
def test_what_is_requested(ranges: list[Any], requests: list[Any], first: list[int]) -> None:
    found = requests_for([Range(*each) for each in ranges])
    assert found == ([Range(*each) for each in requests], first)


def ranges_of(path: Path, seed: int, *, gaps: bool) -> list[Range]:
    """Some of a file, from its beginning to its end."""
    drawing, found, position = random.Random(seed), [], 0
    while position < SIZE:
        length = min(SIZE - position, drawing.choice([0, 1, 100, PAGE, 77_777, REQUEST, 2 * REQUEST + 1]))
        found.append(Range(path, position, length))
        position += length + (drawing.choice([0, 0, 3, PAGE, 100_000, REQUEST]) if gaps else 0)
    return list(dict.fromkeys(found))


def check(files: OpenFiles, each: Range, content: bytes) -> None:
    wanted = content[each.offset : each.offset + each.length]
    hasher = Hasher()
    assert files.read(*each, hasher).tobytes() == wanted
    assert hasher.result() == checksum(wanted)


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_ranges_are_what_the_file_has(path: Path, content: bytes, seed: int, gaps: bool) -> None:
    files, ranges = OpenFiles(), ranges_of(path, seed, gaps=gaps)
    scratch = Scratch()
    with files.reading_ahead(ranges):
        for number, each in enumerate(ranges):
            if number % 3:
                check(files, each, content)
            else:
                wanted = checksum(content[each.offset : each.offset + each.length])
                files.pass_through(*each, hasher := Hasher(), scratch)
                assert hasher.result() == wanted
        assert len(readers()) <= FEW + MANY - 2
    assert readers() == []


@pytest.mark.parametrize(("soon", "least", "most"), [(math.inf, FEW - 1, FEW - 1), (0.0, MANY - 1, MANY)])
def test_a_storage_that_takes_its_time_is_asked_for_more_at_once(
    soon: float, least: int, most: int, path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = LATE + 3 * MANY
    path.write_bytes(content * (count * REQUEST // SIZE + 1))
    change, under_way, seen = threading.Condition(), 0, list[int]()
    read = reading.FileReader.read

    def counting(reader: reading.FileReader, memory: memoryview, offset: int) -> int:
        nonlocal under_way
        with change:
            under_way += 1
            seen.append(under_way)
            change.notify_all()
            if len(seen) > LATE:
                change.wait_for(lambda: max(seen) >= least, timeout=60)
        found = read(reader, memory, offset)
        with change:
            under_way -= 1
        return found

    monkeypatch.setattr(reading.FileReader, "read", counting)
    monkeypatch.setattr(prefetch, "SOON", soon)
    files, scratch = OpenFiles(), Scratch()
    with files.reading_ahead([Range(path, 0, count * REQUEST)]):
        files.pass_through(path, 0, count * REQUEST, hasher := Hasher(), scratch)
    assert hasher.result() == checksum(path.read_bytes()[: count * REQUEST])
    assert max(seen[:LATE]) <= FEW - 1
    assert least <= max(seen) <= most  # one more while the threads of before are still at work
    assert readers() == []


@pytest.mark.parametrize("seed", range(4))
def test_what_is_left_out_is_skipped_and_what_comes_late_is_read_all_the_same(
    path: Path, content: bytes, seed: int
) -> None:
    files, ranges, drawing = OpenFiles(), ranges_of(path, seed, gaps=True), random.Random(seed)
    with files.reading_ahead(ranges):
        for each in drawing.sample(ranges, len(ranges) // 2):
            check(files, each, content)
            check(files, Range(path, 17, 99), content)


def test_many_files_and_the_ranges_of_a_file_that_comes_again(path: Path, content: bytes) -> None:
    others = [path.with_name(f"{number}") for number in range(20)]
    for other in others:
        other.write_bytes(content[: 2 * PAGE])
    gc.collect()  # what other tests have left open
    before = len(list(Path("/proc/self/fd").iterdir()))
    ranges = [Range(place, offset, 100) for offset in (0, 50, PAGE - 1) for place in (*others, path)]
    files = OpenFiles()
    with files.reading_ahead(ranges):
        for each in ranges:
            check(files, each, content)
            assert len(list(Path("/proc/self/fd").iterdir())) <= before + len(others) + 1 + 2 * (MANY + 2)
    del files
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_file_that_is_cut_off_meanwhile_is_damaged(path: Path, content: bytes) -> None:
    files, ranges = OpenFiles(), [Range(path, 0, REQUEST), Range(path, REQUEST, SIZE - REQUEST)]
    os.truncate(path, SIZE - 1)
    with files.reading_ahead(ranges):
        check(files, ranges[0], content)
        with pytest.raises(DamagedCheckpointError, match=f"{SIZE - REQUEST - 1} bytes|truncated"):
            files.read(*ranges[1])
    assert readers() == []


def test_a_file_that_is_gone_is_named_when_it_is_asked_for(path: Path, content: bytes) -> None:
    gone = path.with_name("gone")
    files, ranges = OpenFiles(), [Range(path, 0, 10), Range(gone, 0, 10)]
    with files.reading_ahead(ranges):
        check(files, ranges[0], content)
        with pytest.raises(DamagedCheckpointError, match="gone"):
            files.read(*ranges[1])


def test_what_takes_the_files_name_is_not_read(path: Path, content: bytes) -> None:
    files = OpenFiles()
    check(files, Range(path, 0, 1), content)
    path.unlink()
    path.write_bytes(bytes(SIZE))
    with files.reading_ahead([Range(path, 0, SIZE)]):
        check(files, Range(path, 0, SIZE), content)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_is_heard_where_its_bytes_are_asked_for(
    code: int, path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv

    def failing(descriptor: int, memory: Any, offset: int) -> int:
        if offset >= 6 * REQUEST:
            raise OSError(code, os.strerror(code))
        return preadv(descriptor, memory, offset)

    monkeypatch.setattr(os, "preadv", failing)
    files, ranges = OpenFiles(), [Range(path, start, REQUEST) for start in range(0, 8 * REQUEST, REQUEST)]
    with files.reading_ahead(ranges):
        for each in ranges[:6]:
            check(files, each, content)
        for each in ranges[6:]:
            with pytest.raises(OSError, match=os.strerror(code)):
                files.read(*each)
    assert readers() == []


def test_a_file_system_without_o_direct(path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    opening = os.open

    def refused(place: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opening(place, flags, *rest)

    monkeypatch.setattr(os, "open", refused)
    files = OpenFiles()
    with files.reading_ahead([Range(path, 3, SIZE - 3)]):
        check(files, Range(path, 3, SIZE - 3), content)


def test_what_is_not_cached_bypasses_the_cache_and_what_is_does_not(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        cached = reading.is_cached(descriptor, 0, REQUEST)
        files = OpenFiles()
        with files.reading_ahead([Range(path, 0, SIZE)]):
            check(files, Range(path, 0, SIZE), content)
        assert reading.is_cached(descriptor, 0, REQUEST) is cached
    finally:
        os.close(descriptor)


def test_object_stores_prefetch_in_their_own_way() -> None:
    place = as_path("memory://ahead/file")
    place.write_bytes(b"0123456789")
    files = OpenFiles()
    with files.reading_ahead([Range(place, 2, 5)]):
        assert readers() == []
        assert files.read(place, 2, 5).tobytes() == b"23456"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert readers() == []
