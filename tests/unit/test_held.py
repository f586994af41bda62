# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A checkpoint that is overwritten while it is read: what was opened is read on, or an error says that it is gone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mbridge_fsdp_ckpt.commit import rename
from mbridge_fsdp_ckpt.errors import DamagedCheckpointError
from mbridge_fsdp_ckpt.format.source import CheckpointSource, StoredChunk
from mbridge_fsdp_ckpt.opening import open_checkpoint
from mbridge_fsdp_ckpt.plan.boxes import whole
from tests.unit import handmade
from tests.unit.handmade import KEYS, TENSORS

OTHERS = {key: tensor + 100 for key, tensor in TENSORS.items()}
STAGING = ".staging-iter_0000010-0123456789ab"

Make = Callable[[Path, dict[str, torch.Tensor]], Path]
Chunks = dict[str, list[StoredChunk]]


def make_stock(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    state: dict[str, Any] = dict(tensors)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory, single_file_per_rank=True), no_dist=True)
    return directory


@pytest.fixture(params=[handmade.make, make_stock], ids=["safe", "stock"])
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


@pytest.fixture
def directory(tmp_path: Path, make: Make) -> Path:
    return make(tmp_path / "iter_0000010", TENSORS)


def overwrite(directory: Path, make: Make) -> None:
    """What a save of the same layout does in its last step, and after it."""
    for path in rename.put_in_place(make(directory.parent / STAGING, OTHERS), directory):
        shutil.rmtree(str(path))


def step_aside(directory: Path, make: Make) -> None:
    """The same where directories cannot be exchanged."""
    staging = make(directory.parent / STAGING, OTHERS)
    directory.rename(directory.with_name(".replaced-iter_0000010-0123456789ab"))
    staging.rename(directory)


def read(source: CheckpointSource, chunks: Chunks) -> dict[str, torch.Tensor]:
    """All tensors, unverified."""
    found = {key: torch.zeros_like(tensor) for key, tensor in TENSORS.items()}
    for key, tensor in found.items():
        for chunk in chunks[key]:
            tensor[chunk.box.slices_in(whole(tuple(tensor.shape)))] = source.read(chunk, verify=False)
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[key], expected[key]) for key in KEYS)


def test_a_checkpoint_that_steps_aside_once_it_is_checked_is_read_on(directory: Path, make: Make) -> None:
    source = open_checkpoint(directory)
    chunks = source.chunks(KEYS)
    step_aside(directory, make)
    assert same(read(source, chunks), TENSORS)
    other = open_checkpoint(directory)
    assert other.metadata.identity != source.metadata.identity
    assert same(read(other, other.chunks(KEYS)), OTHERS)


def test_a_checkpoint_that_steps_aside_once_it_is_open_is_read_on(directory: Path, make: Make) -> None:
    source = open_checkpoint(directory)
    step_aside(directory, make)
    assert same(read(source, source.chunks(KEYS)), TENSORS)
    assert [record.coordinates for record in source.ranks()] == [
        r.coordinates for r in open_checkpoint(directory).ranks()
    ]


def test_a_checkpoint_that_was_replaced_and_deleted_is_a_named_error(directory: Path, make: Make) -> None:
    source = open_checkpoint(directory)
    chunks = source.chunks(KEYS)
    overwrite(directory, make)
    with pytest.raises(DamagedCheckpointError, match="replaced or removed while it was read") as caught:
        read(source, chunks)
    assert Path(str(caught.value.key)).parent == directory


def test_files_that_were_read_from_outlive_their_checkpoint(directory: Path, make: Make) -> None:
    source = open_checkpoint(directory)
    chunks = source.chunks(KEYS)
    read(source, chunks)
    overwrite(directory, make)
    assert same(read(source, chunks), TENSORS)


def test_a_file_is_opened_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_checkpoint(directory)
    chunks = source.chunks(KEYS)
    opened: list[str] = []
    original = os.open

    def counted(path: Any, *arguments: Any, **options: Any) -> int:
        opened.append(Path(path).name)
        return original(path, *arguments, **options)

    monkeypatch.setattr(os, "open", counted)
    for _ in range(2):
        read(source, chunks)
    in_files = (chunk for held in chunks.values() for chunk in held if chunk.record.length)
    assert sorted(opened) == sorted({chunk.path.name for chunk in in_files})


def test_what_a_checkpoint_holds_open_goes_with_it(directory: Path) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    source = open_checkpoint(directory)
    chunks = source.chunks(KEYS)
    read(source, chunks)
    assert len(set(Path("/proc/self/fd").iterdir()) - before) > 1
    del source, chunks
    assert set(Path("/proc/self/fd").iterdir()) <= before


HOLDS = """
import sys
from pathlib import Path
import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.opening import open_checkpoint
source = open_checkpoint(Path(sys.argv[1]))
chunks = source.chunks(source.metadata.keys)
read = [source.read(chunk) for many in chunks.values() for chunk in many]
print(len(read))
"""


def test_a_program_that_ends_with_a_checkpoint_open_ends_quietly(make: Make, tmp_path: Path) -> None:
    """Descriptors were closed by `__del__`, when modules were gone already: one traceback for each."""
    directory = make(tmp_path / "c", TENSORS)
    ended = subprocess.run(
        [sys.executable, "-c", HOLDS, str(directory)], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(ended.stdout) >= len(TENSORS)
    assert ended.stderr == ""
