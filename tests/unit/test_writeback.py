# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A file comes to disk while it grows, and whoever writes it says so: no long silence, whatever its size."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mbridge_fsdp_ckpt.format.payload import PayloadWriter
from mbridge_fsdp_ckpt.io import direct_writer, writeback
from mbridge_fsdp_ckpt.io.checksums import HASHED_AT_ONCE
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.settings import DEFAULT_STORAGE_LIMIT, DEFAULT_TIME_LIMIT

MIB = 1 << 20
BLOCK = 1 << 18
SPEED = 100_000_000  # bytes a second


class SlowDisk:
    """Counts seconds: writing goes to memory at once, and waiting for it to be on disk takes its time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size, self.on_disk, self.now = 0, 0, 0.0
        self.heartbeats = [0.0]
        self.waits: list[float] = []
        real_range, real_flush = writeback.sync_range, os.fsync

        def sync_range(descriptor: int, start: int, length: int, *, wait: bool) -> None:
            real_range(descriptor, start, length, wait=wait)
            if wait:
                self._wait_until(start + length)

        def flush(descriptor: int) -> None:
            real_flush(descriptor)
            self._wait_until(os.fstat(descriptor).st_size)

        monkeypatch.setattr(writeback, "sync_range", sync_range)
        monkeypatch.setattr(os, "fsync", flush)

    def _wait_until(self, position: int) -> None:
        seconds = max(0, position - self.on_disk) / SPEED
        self.on_disk = max(self.on_disk, position)
        self.now += seconds
        self.waits.append(seconds)

    def sign(self) -> None:
        self.heartbeats.append(self.now)


@pytest.fixture(autouse=True)
def through_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that knows no O_DIRECT, and blocks that are smaller than a window."""

    def refused(descriptor: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return os.O_WRONLY

    monkeypatch.setattr(direct_writer, "BLOCK", BLOCK)
    monkeypatch.setattr(
        direct_writer, "fcntl", SimpleNamespace(fcntl=refused, F_GETFL=fcntl.F_GETFL, F_SETFL=fcntl.F_SETFL)
    )


def written(path: Path, disk: SlowDisk, count: int) -> PayloadWriter:
    writer = PayloadWriter(path, progress=disk.sign)
    writer.add("weight", torch.arange(count, dtype=torch.int64), Box((0,), (count,)))
    return writer


@pytest.mark.parametrize("mib", [1, 8, 33])
def test_a_chunk_of_any_size_is_silent_for_no_longer_than_a_window_takes(
    mib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One chunk, a window of 4 MiB for 256: a rank that writes 100 GB at 100 MB/s gives a sign every 3 s or so."""
    window = 4 * MIB
    monkeypatch.setattr(writeback, "WINDOW", window)
    disk = SlowDisk(monkeypatch)
    writer = written(tmp_path / "file", disk, mib * MIB // 8)
    entry = writer.close()
    disk.sign()
    assert entry.size > mib * MIB
    assert disk.now == pytest.approx(entry.size / SPEED)
    longest = max(after - before for before, after in zip(disk.heartbeats, disk.heartbeats[1:], strict=False))
    assert longest <= (2 * window + direct_writer.BLOCKS * BLOCK + HASHED_AT_ONCE) / SPEED
    assert len(disk.heartbeats) > mib * MIB // HASHED_AT_ONCE


def test_the_default_limits_are_far_above_what_a_slow_disk_takes() -> None:
    longest = (2 * writeback.WINDOW + direct_writer.BLOCKS * direct_writer.BLOCK + HASHED_AT_ONCE) / SPEED
    assert longest < 2.0
    assert longest < DEFAULT_TIME_LIMIT / 8
    assert 100e9 / SPEED < DEFAULT_STORAGE_LIMIT, "even where a file system flushes nothing before it must"


def test_bytes_are_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writeback, "WINDOW", MIB)
    disk = SlowDisk(monkeypatch)
    writer = written(tmp_path / "file", disk, MIB)
    writer.close()
    assert len(disk.waits) == 8, "all full windows but the last, and the flush at the end"
    assert torch.equal(torch.load(tmp_path / "file", weights_only=True), torch.arange(MIB))


class Libc:
    """A kernel that refuses every sync_file_range."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """As `ctypes.CDLL` is made."""

    def sync_file_range(self, *arguments: Any) -> int:
        return -1


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_refuses_meanwhile_is_heard(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writeback, "WINDOW", MIB)
    replaced(monkeypatch, code)
    with pytest.raises(OSError, match=os.strerror(code)):
        written(tmp_path / "file", SlowDisk(monkeypatch), MIB)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL])
def test_where_a_range_cannot_be_flushed_the_whole_file_is(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writeback, "WINDOW", MIB)
    replaced(monkeypatch, code)
    flushed: list[int] = []
    monkeypatch.setattr(os, "fdatasync", flushed.append)
    written(tmp_path / "file", SlowDisk(monkeypatch), MIB).close()
    assert len(flushed) == 7


def replaced(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(ctypes, "CDLL", Libc)
    monkeypatch.setattr(ctypes, "get_errno", lambda: code)
