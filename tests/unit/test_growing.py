# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A file that grows has the bytes that were written, whatever their lengths, and every refusal is heard."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import mmap
import os
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mbridge_fsdp_ckpt.io import buffers, direct_writer
from mbridge_fsdp_ckpt.io.direct_writer import BLOCK, DirectWriter
from mbridge_fsdp_ckpt.io.reading import ALIGNED

PAGE = ALIGNED
SIZES = [0, 1, PAGE - 1, PAGE, PAGE + 1, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + PAGE, 5 * BLOCK, 6 * BLOCK + 12_345]


@pytest.fixture(scope="module")
def content() -> bytes:
    """Bytes that no two blocks have in common."""
    return hashlib.shake_128(b"seed").digest(max(SIZES))


@pytest.fixture(params=["disk", "memory", "file system without O_DIRECT"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    if request.param == "memory":
        folder = Path("/dev/shm") / f"test_growing-{os.getpid()}"
        folder.mkdir()
        try:
            yield folder
        finally:
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
        return
    with mounted("ramfs", tmp_path) as folder:
        with (folder / "probe").open("wb") as probe, pytest.raises(OSError, match="Invalid argument"):
            fcntl.fcntl(probe.fileno(), fcntl.F_SETFL, os.O_DIRECT)
        yield folder


class mounted:  # noqa: N801  # used as a function
    """A file system in memory; skips the test where this process may not mount."""

    def __init__(self, kind: str, place: Path, options: str = "rw") -> None:
        self._command, self._place = ["mount", "-t", kind, "-o", options, kind, str(place)], place

    def __enter__(self) -> Path:
        done = subprocess.run(self._command, capture_output=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"mounting is not allowed here: {done.stderr.decode().strip()}")
        return self._place

    def __exit__(self, *about: object) -> None:
        subprocess.run(["umount", str(self._place)], check=True)


def fill(file: DirectWriter, data: bytes, step: int) -> None:
    for start in range(0, len(data), step):
        file.write(memoryview(data)[start : start + step])
    file.finish()


def write(path: Path, data: bytes, step: int) -> None:
    file = DirectWriter(path)
    try:
        fill(file, data, step)
    finally:
        file.close()


def writers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("writing")]


@pytest.mark.parametrize("size", SIZES)
def test_a_file_has_what_was_written(size: int, content: bytes, place: Path) -> None:
    for number, step in enumerate((1 << 21, 1_000_003, max(SIZES))):
        write(place / f"{number}", content[:size], step)
        assert (place / f"{number}").read_bytes() == content[:size]
        (place / f"{number}").unlink()
    assert writers() == []


def test_few_bytes_take_no_thread_and_little_memory(tmp_path: Path, content: bytes) -> None:
    file = DirectWriter(tmp_path / "file")
    file.write(content[:BLOCK])
    assert writers() == []
    file.write(content[:1])
    assert len(writers()) == 1
    file.finish()
    assert writers() == []


def test_at_most_four_blocks_are_in_memory(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is not on disk yet at any time: the silence of a slow disk is no longer than it takes for that."""
    made, pwrite, behind, given = [], os.pwrite, [0], [0]
    done: dict[int, int] = {}
    new_block = buffers.new_block

    def counted(size: int) -> mmap.mmap:
        made.append(size)
        return new_block(size)

    def noted(descriptor: int, view: memoryview, offset: int) -> int:
        done[offset] = pwrite(descriptor, view, offset)
        return done[offset]

    monkeypatch.setattr(buffers, "new_block", counted)
    monkeypatch.setattr(os, "pwrite", noted)
    file = DirectWriter(tmp_path / "file")
    for start in range(0, len(content), 1 << 21):
        file.write(content[start : start + (1 << 21)])
        given[0] += len(content[start : start + (1 << 21)])
        behind.append(given[0] - sum(done.values()))
    file.finish()
    assert made == [BLOCK] * direct_writer.BLOCKS
    assert max(behind) <= direct_writer.BLOCKS * BLOCK
    assert (tmp_path / "file").read_bytes() == content


def test_a_file_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        DirectWriter(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"precious"


def refused(code: int, path: Path, content: bytes, size: int) -> None:
    """The refusal is heard once all is written, at the latest, and again at each call after that; nothing hangs."""
    file = DirectWriter(path)
    try:
        with pytest.raises(OSError, match=os.strerror(code)) as first:
            fill(file, content[:size], 1 << 21)
        with pytest.raises(OSError, match=os.strerror(code)) as second:
            file.finish()
        assert (first.value.errno, second.value.errno) == (code, code)
    finally:
        file.close()
    file.close()
    assert writers() == []


@pytest.mark.parametrize("size", [PAGE, 2 * BLOCK + 1, 6 * BLOCK])
def test_a_file_that_may_not_grow_any_more(size: int, tmp_path: Path, content: bytes) -> None:
    """Limits inside and between pages and blocks."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for number, limit in enumerate((1, size // 2, size // 2 + 1, size - 1)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            refused(errno.EFBIG, tmp_path / f"{number}", content, size)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
@pytest.mark.parametrize("size", [BLOCK, 6 * BLOCK])
def test_a_file_system_that_is_really_full(kind: str, size: int, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "small").mkdir()
    with full(kind, tmp_path) as place:
        refused(errno.ENOSPC, place / "file", content, size)


def full(kind: str, folder: Path) -> mounted:
    """A file system of 5 MB."""
    if kind == "tmpfs":
        return mounted("tmpfs", folder / "small", "size=5m")
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(5_000_000)
    made = subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], capture_output=True, check=False)
    if made.returncode != 0:
        pytest.skip(made.stderr.decode())
    found = mounted("ext4", folder / "small", "loop")
    found._command[-2] = str(image)
    return found


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("number", [0, 1, 3, 5])
def test_every_write_that_fails_is_heard(
    number: int, code: int, tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, pwrite = itertools.count(), os.pwrite

    def failing(descriptor: int, view: memoryview, offset: int) -> int:
        if next(calls) >= number:
            raise OSError(code, os.strerror(code))
        return pwrite(descriptor, view, offset)

    monkeypatch.setattr(os, "pwrite", failing)
    refused(code, tmp_path / "file", content, 6 * BLOCK)


@pytest.mark.parametrize(
    "shortened",
    [lambda length: max(1, length // 2), lambda length: min(length, 3 * PAGE), lambda length: min(length, PAGE + 1)],
)
def test_writes_that_take_a_part_are_gone_on_with(
    shortened: Callable[[int], int], tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, pwrite = 2 * BLOCK + 77, os.pwrite
    first = {0, BLOCK, 2 * BLOCK}

    def partly(descriptor: int, view: memoryview, offset: int) -> int:
        return pwrite(descriptor, view[: shortened(len(view))] if offset in first else view, offset)

    monkeypatch.setattr(os, "pwrite", partly)
    write(tmp_path / "file", content[:size], 1 << 21)
    assert (tmp_path / "file").read_bytes() == content[:size]


def test_a_file_system_that_refuses_o_direct_at_the_first_write(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some take the flag, and then want other sectors."""
    pwrite, size, refusals = os.pwrite, 6 * BLOCK + 5, []

    def choosy(descriptor: int, view: memoryview, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refusals.append(offset)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return pwrite(descriptor, view, offset)

    monkeypatch.setattr(os, "pwrite", choosy)
    write(tmp_path / "file", content[:size], 1 << 21)
    assert (tmp_path / "file").read_bytes() == content[:size]
    assert 1 <= len(refusals) <= 2


def test_giving_up_ends_all_threads_and_closes(tmp_path: Path, content: bytes) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    file = DirectWriter(tmp_path / "file")
    file.write(content[: 5 * BLOCK])
    file.close()
    assert writers() == []
    assert len(list(Path("/proc/self/fd").iterdir())) == before
