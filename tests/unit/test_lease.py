# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Leases are as old as the storage says, whatever the clocks of hosts say."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from upath import UPath

from mbridge_fsdp_ckpt.commit import lease, methods
from mbridge_fsdp_ckpt.commit.retention import being_read
from mbridge_fsdp_ckpt.commit.target import _counts_for_nothing
from mbridge_fsdp_ckpt.io.store import store_of
from mbridge_fsdp_ckpt.tools.size_and_age import is_young

TOKEN = "0123456789ab"
STAGING, READING = f".staging-iter_0000020-{TOKEN}", f".reading-iter_0000030-{TOKEN}"
HOUR = 3600.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Another job saves iteration 20, and somebody reads iteration 30."""
    (tmp_path / "iter_0000030").mkdir()
    touched(tmp_path, time.time())
    return tmp_path


def who_live(root: Path) -> list[bool]:
    """Whether the other job, or the reader, is taken for living, wherever that is asked."""
    found = [being_read(root / "iter_0000030"), is_young(root / STAGING), is_young(root / READING)]
    found.append(not _counts_for_nothing(root / STAGING))
    return [*found, methods.condemn_leftovers(root / "iter_0000010") == []]


def touched(root: Path, moment: float) -> None:
    """When both have given their last heartbeat."""
    for name in (f"{STAGING}/__0_0.distcp", STAGING, READING):
        if not (root / name).exists():
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).touch()
        os.utime(root / name, (moment, moment))


@pytest.mark.parametrize("ahead", [-30 * HOUR, -2 * HOUR, 0.0, 2 * HOUR, 30 * HOUR])
def test_a_hosts_clock_takes_no_living_jobs_staging_and_keeps_no_dead_ones(
    root: Path, ahead: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the storage's clock is the kernel's; that of the host is ahead of it."""
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + ahead)
    for seconds, living in ((0, True), (lease.STALE_S - 60, True), (lease.STALE_S + 60, False)):
        touched(root, right() - seconds)
        assert set(who_live(root)) == {living}, f"touched {seconds} s ago"
    assert list(root.glob(".clock*")) == []


def test_what_is_renewed_stays_when_the_storages_clock_is_set(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward: all leases seem old until they are renewed.  Back: those from before are from the future."""
    ahead, original = 0.0, os.utime

    def utime(path: Any, times: tuple[float, float] | None = None) -> None:
        original(path, (time.time() + ahead,) * 2 if times is None else times)

    monkeypatch.setattr(os, "utime", utime)
    assert all(who_live(root))
    ahead = 2 * HOUR
    assert all(who_live(root)), "nobody has had the time to renew"
    touched(root, time.time() - lease.STALE_S - 60)
    assert not any(who_live(root)), "dead for long"
    (root / STAGING).mkdir(exist_ok=True)
    for seconds in (-3 * HOUR, 0.0):
        ahead = seconds
        for name in (STAGING, READING):
            (root / name).touch()
            lease.renew(root / name)
        assert all(who_live(root))


def test_where_nothing_can_be_written_nothing_is_old(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could delete it there, either."""
    touched(root, time.time() - 30 * HOUR)

    def refused(self: Path, data: bytes) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "write_bytes", refused)
    assert all(who_live(root))


def test_what_tells_no_times_keeps_all_and_touching_an_object_writes_it_anew() -> None:
    root = UPath(f"memory://{uuid.uuid4().hex}")
    mark = root / READING
    mark.write_bytes(b"")
    made = mark.fs.created(mark.path)
    assert not lease.is_stale(mark)
    store_of(mark).touch()
    assert mark.fs.created(mark.path) > made
    assert [path.name for path in root.iterdir()] == [READING]
    mark.unlink()
    assert lease.is_stale(mark), "whoever held it is done"
