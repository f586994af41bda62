# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Deleting in the background: no save waits for it, nothing fails by it, and what stays is found later."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from mbridge_fsdp_ckpt.commit import removal
from tests.unit import handmade
from tests.unit.shards import shards
from tests.unit.test_cli import call
from tests.unit.test_saving import prepared, save

TOKEN = "0123456789ab"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "iter_0000010"


@pytest.fixture
def deleted_by(target: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that delete directories beside the target."""
    found: list[str] = []
    original = shutil.rmtree

    def rmtree(path: Any, *arguments: Any, **named: Any) -> None:
        if Path(path).parent == target.parent:
            found.append(threading.current_thread().name)
        original(path, *arguments, **named)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    return found


def test_no_save_waits_until_the_older_checkpoint_is_deleted(target: Path, deleted_by: list[str]) -> None:
    for _ in range(2):
        save(target, [prepared(shards(0, 12))])
    assert removal.wait(30.0)
    assert deleted_by == ["mbridge_fsdp_ckpt.removal"]
    assert [path.name for path in target.parent.iterdir()] == ["iter_0000010"]


def test_no_save_waits_until_a_dead_ones_staging_is_deleted(target: Path, deleted_by: list[str]) -> None:
    (target.parent / f".staging-iter_0000010-{TOKEN}" / "sub").mkdir(parents=True)
    save(target, [prepared(shards(0, 12))])
    assert removal.wait(30.0)
    assert deleted_by == ["mbridge_fsdp_ckpt.removal"]
    assert [path.name for path in target.parent.iterdir()] == ["iter_0000010"]


def test_another_jobs_staging_stays(target: Path) -> None:
    """save("ckpts/a") in one job and save("ckpts/b") in another."""
    others = target.parent / f".staging-iter_0000020-{TOKEN}"
    others.mkdir()
    save(target, [prepared(shards(0, 12))])
    assert removal.wait(30.0)
    assert others.is_dir()


def test_a_save_renews_the_lease_of_its_staging(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its heartbeats, however long it takes."""
    renewed: list[str] = []
    monkeypatch.setattr("mbridge_fsdp_ckpt.commit.lease.STALE_S", 0.0)
    original = os.utime

    def utime(path: Any, *arguments: Any) -> None:
        renewed.append(Path(path).name)
        original(path, *arguments)

    monkeypatch.setattr(os, "utime", utime)
    save(target, [prepared(shards(0, 12))])
    assert renewed
    assert all(name.startswith(".staging-iter_0000010-") for name in renewed)


@pytest.mark.parametrize("arguments", [("reshard", "--ranks", "1"), ("to-stock",)], ids=lambda found: found[0])
def test_a_conversion_renews_the_lease_of_its_staging(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a job that saves in the same root would take it away after an hour."""
    renewed = set[str]()
    original = os.utime

    def utime(path: Any, *others: Any) -> None:
        renewed.add(Path(path).name.rpartition("-")[0])
        original(path, *others)

    source = handmade.make(tmp_path / "iter_0000010")
    monkeypatch.setattr("mbridge_fsdp_ckpt.commit.lease.STALE_S", 0.0)
    monkeypatch.setattr(os, "utime", utime)
    name, *options = arguments
    assert call("convert", name, source, tmp_path / "new" / "iter_0000010", *options).exit_code == 0
    assert {".staging-iter_0000010", ".reading-iter_0000010"} <= renewed


def test_what_cannot_be_deleted_stays_and_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One file that the storage keeps, as NFS does with an open one, does not keep the others."""
    directory = tmp_path / ".deleted-iter_0000010-x"
    directory.mkdir()
    for name in ("a", ".nfs0001", "z"):
        (directory / name).touch()
    original = os.unlink

    def unlink(path: Any, *arguments: Any, **named: Any) -> None:
        if Path(path).name == ".nfs0001":
            raise OSError(16, "Device or resource busy")
        original(path, *arguments, **named)

    monkeypatch.setattr(os, "unlink", unlink)
    with caplog.at_level(logging.WARNING):
        removal.delete_later([directory])
        assert removal.wait(30.0)
    assert [path.name for path in directory.iterdir()] == [".nfs0001"]
    assert "stays for a later save" in caplog.text
    assert "busy" in caplog.text


def test_a_file_a_link_and_what_is_gone_already(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(kept)
    with caplog.at_level(logging.WARNING):
        assert all(removal.delete(tmp_path / name) for name in ("file", "link", "gone"))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert caplog.text == ""


def test_what_fails_is_logged_and_the_next_thing_is_done(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []

    def fail() -> None:
        raise ValueError("no such luck")

    with caplog.at_level(logging.WARNING):
        removal.later("the first", fail)
        removal.later("the second", lambda: done.append(2))
        assert removal.wait(30.0)
    assert done == [2]
    assert "the first: left to a later save" in caplog.text
    assert "no such luck" in caplog.text


def test_without_a_thread_to_be_had_it_is_left_to_a_later_save(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with caplog.at_level(logging.WARNING):
        removal.later("something", lambda: None)
    assert "can't start new thread" in caplog.text
    assert removal.wait(0.0)


_ENDS = """
import sys, time
from pathlib import Path
from mbridge_fsdp_ckpt.commit import removal
removal.EXIT_S = 0.2
removal.later("an hour", lambda: time.sleep(3600.0 if sys.argv[2] == "stuck" else 0.05))
removal.delete_later([Path(sys.argv[1])])
"""


@pytest.mark.parametrize("how", ["quick", "stuck"])
def test_a_process_that_ends_waits_a_moment_and_no_longer(how: str, tmp_path: Path) -> None:
    """The time limit of this call is there for a process that would wait for the hour."""
    doomed = tmp_path / "doomed"
    doomed.mkdir()
    subprocess.run([sys.executable, "-c", _ENDS, str(doomed), how], check=True, timeout=120)
    assert doomed.exists() is (how == "stuck")
