# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`repair --stock-view`: stock reads what was saved without a view."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from mbridge_fsdp_ckpt.format.manifest import read_manifest
from mbridge_fsdp_ckpt.io.checksums import checksum
from mbridge_fsdp_ckpt.io.entries import ExtraEntry
from tests.unit import handmade
from tests.unit.handmade import TENSORS, write_manifest
from tests.unit.test_cli import call, data


@pytest.fixture
def root(tmp_path: Path) -> Path:
    handmade.make(tmp_path / "iter_0000020")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    return tmp_path


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_stocks_view_can_be_made_later(root: Path) -> None:
    directory = root / "iter_0000020"
    assert call("repair", directory, "--stock-view", "--dry-run").exit_code == 0
    assert not (directory / ".metadata").exists()
    assert [step["done"] for step in data("repair", root, "--stock-view")["steps"]] == [True]
    found = {key: torch.zeros_like(tensor) for key, tensor in TENSORS.items()}
    dcp.load(found, checkpoint_id=directory, no_dist=True)
    assert all(torch.equal(found[key], tensor) for key, tensor in TENSORS.items())
    assert data("verify", directory)["intact"]
    assert data("inspect", directory)["stock_view"]
    again = data("repair", root, "--stock-view")
    assert again["left_alone"] == [{"path": str(directory / ".metadata"), "why": "DCP metadata is there"}]


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_a_view_that_the_manifest_lists_comes_back_as_it_was_or_not_at_all(root: Path) -> None:
    directory = root / "iter_0000020"
    data("repair", root, "--stock-view")
    parts = {name: (directory / name).read_bytes() for name in (".metadata", "__0_1.distcp")}
    metadata = read_manifest(directory)
    entries = tuple(ExtraEntry(name=n, size=len(d), checksum=checksum(d)) for n, d in parts.items())
    write_manifest(directory / "manifest.json", metadata.model_copy(update={"files": entries}))
    (directory / ".metadata").unlink()
    data("repair", root, "--stock-view")
    assert data("verify", directory)["intact"]
    other = (entries[0].model_copy(update={"checksum": "xxh3_64:0"}), entries[1])
    write_manifest(directory / "manifest.json", metadata.model_copy(update={"files": other}))
    (directory / ".metadata").unlink()
    shown = call("repair", root, "--stock-view")
    assert shown.exit_code == 1
    assert shown.stderr.startswith("DamagedCheckpointError: ")
    assert not (directory / ".metadata").exists()


def test_a_stock_checkpoint_needs_no_view(tmp_path: Path) -> None:
    (tmp_path / ".metadata").touch()
    shown = call("repair", tmp_path, "--stock-view")
    assert shown.exit_code == 1
    assert shown.stderr.startswith("ConfigurationError: ")
