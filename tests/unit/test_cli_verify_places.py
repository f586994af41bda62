# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`verify` on object stores, on stock checkpoints, in a pipe, and interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp
from upath import UPath

from mbridge_fsdp_ckpt.format.manifest import read_manifest
from mbridge_fsdp_ckpt.io.entries import ExtraEntry
from tests.unit import handmade
from tests.unit.handmade import BIAS, payload, write_manifest
from tests.unit.test_cli import call, data, run
from tests.unit.test_cli_verify import chunks_of, flip, named, truncate


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return handmade.make(tmp_path / "iter_0000010")


def test_an_object_store_is_audited_as_well(directory: Path) -> None:
    place = UPath("memory://verify/iter_0000010")
    for path in directory.iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    assert data("verify", str(place))["intact"]
    flip(place / payload(1), chunks_of(directory, 1)[BIAS].record.offset)
    assert named(data("verify", str(place), code=1)) == [("file", payload(1), None), ("chunk", payload(1), BIAS)]


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    state = {"model": {"weight": torch.arange(12.0).reshape(4, 3), "bias": torch.ones(3)}, "iteration": 10}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    return tmp_path / "stock"


def test_a_stock_checkpoint_is_checked_as_far_as_it_can_be(stock: Path) -> None:
    found = data("verify", stock)
    assert (found["format"], found["checked"], found["findings"]) == ("fsdp_dtensor", {"keys": 2, "values": 1}, [])
    assert found["notes"] == ["stock fsdp_dtensor has no checksums: only structure and file sizes were checked"]


def test_a_truncated_stock_checkpoint_is_found(stock: Path) -> None:
    assert call("verify", stock).stdout.splitlines()[-1] == "No damage found."
    truncate(stock / "__0_0.distcp", 100)
    found = data("verify", stock, code=1)
    assert {file for _, file, _ in named(found)} == {"__0_0.distcp"}
    truncate(stock / ".metadata", 10)
    assert named(data("verify", stock, code=1)) == [("manifest", ".metadata", None)]


def test_piped_output_is_plain_and_whole(directory: Path) -> None:
    flip(directory / payload(1), chunks_of(directory, 1)[BIAS].record.offset)
    found = run("verify", str(directory), columns=40)
    assert (found.returncode, found.stderr) == (1, "")
    assert "\x1b" not in found.stdout
    assert f"  expected  xxh3_64:{chunks_of(directory, 1)[BIAS].checksum:016x}\n" in found.stdout


def _heed_interrupts() -> None:
    """A shell lets what it runs in the background ignore them, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_interrupted_it_ends_at_once_without_a_word(directory: Path) -> None:
    with (directory / "huge").open("wb") as file:
        file.truncate(1 << 42)
    entry = ExtraEntry(name="huge", size=1 << 42, checksum="xxh3_64:0")
    write_manifest(directory / "manifest.json", read_manifest(directory).model_copy(update={"files": (entry,)}))
    command = [sys.executable, "-m", "mbridge_fsdp_ckpt", "verify", str(directory)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_heed_interrupts
    ) as process:
        try:
            deadline = time.monotonic() + 80
            while not list(directory.parent.glob(".reading-*")) and time.monotonic() < deadline:
                time.sleep(0.05)
            os.kill(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=80)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (130, "", "")
    assert list(directory.parent.glob(".reading-*")) == []
