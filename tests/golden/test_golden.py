# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Every golden checkpoint is read, tensor by tensor, and every damaged one refused by its error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mbridge_fsdp_ckpt.format.source import CheckpointSource
from mbridge_fsdp_ckpt.loading.match import check_coverage
from mbridge_fsdp_ckpt.opening import check_other_files, open_checkpoint
from mbridge_fsdp_ckpt.plan.boxes import whole
from tests.core import oracle
from tests.golden import cases
from tests.golden.archive import SUFFIX, unpack
from tests.golden.damage import DAMAGES

FOLDERS = sorted(path.parent for path in cases.FOLDER.glob("*/expected.json"))
GOLDEN = [
    folder / f"{name}{SUFFIX}" for folder in FOLDERS for name in json.loads((folder / "expected.json").read_text())
]
DAMAGED = sorted(path for folder in FOLDERS for path in folder.glob(f"damaged/*{SUFFIX}"))
LIMIT = 1 << 20


def named(path: Path) -> str:
    return path.relative_to(cases.FOLDER).as_posix().removesuffix(SUFFIX)


def name_of(path: Path) -> str:
    return path.name.removesuffix(SUFFIX)


def read(source: CheckpointSource) -> dict[str, torch.Tensor]:
    """Every tensor, put together from its chunks, each of which is verified."""
    chunks = source.chunks(list(source.metadata.keys))
    check_coverage({key: [whole(entry.shape)] for key, entry in source.metadata.keys.items()}, chunks)
    found = {}
    for key, parts in chunks.items():
        entry = source.metadata.keys[key]
        tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for chunk in parts:
            tensor[chunk.box.slices_in(whole(entry.shape))] = source.read(chunk)
        found[key] = tensor
    return found


@pytest.mark.parametrize("path", GOLDEN, ids=named)
def test_every_tensor_is_the_one_that_was_saved(path: Path, tmp_path: Path) -> None:
    source = open_checkpoint(unpack(path, tmp_path / "unpacked"))
    check_other_files(source.metadata, content=True)
    expected = json.loads((path.parent / "expected.json").read_text())[name_of(path)]
    tensors = read(source)
    numbers = {key: tensors.pop(key) for key in [key for key in tensors if key.endswith(".step")]}
    found = {key: list(map(_plain, oracle.digest(tensor))) for key, tensor in tensors.items()}
    assert found == expected
    assert {float(number) for number in numbers.values()} <= {cases.STEPS}
    assert source.metadata.values["iteration"] == cases.STEPS
    assert list(source.ranks()) != []
    if path.parent.name.startswith("safe"):
        assert repr(dict(source.metadata.values)) == repr(cases.VALUES)


def _plain(part: Any) -> Any:
    return list(part) if isinstance(part, tuple) else part


@pytest.mark.parametrize("path", DAMAGED, ids=named)
def test_a_damaged_one_is_refused_by_its_error(path: Path, tmp_path: Path) -> None:
    _, _, error = DAMAGES[path.parents[1].name.partition("-")[0]][name_of(path)]
    damaged = unpack(path, tmp_path / "unpacked")
    with pytest.raises(error) as caught:
        read(open_checkpoint(damaged))
    assert type(caught.value) is error


def test_all_are_there_and_small() -> None:
    """An empty folder would prove nothing."""
    assert {name_of(path) for path in GOLDEN} == {*cases.SAFE, *cases.STOCK}
    assert {folder.name.partition("-")[2] for folder in FOLDERS} == {
        "0.18",
        "0.19",
        "1.0",
        "1.0-newest-torch",
        "1.0-verl",
    }
    assert {name_of(path) for path in DAMAGED} == {name for damages in DAMAGES.values() for name in damages}
    assert sum(file.stat().st_size for folder in FOLDERS for file in folder.rglob("*") if file.is_file()) < LIMIT


@pytest.mark.parametrize("path", GOLDEN, ids=named)
def test_no_file_says_where_it_was_made(path: Path, tmp_path: Path) -> None:
    here = str(Path(__file__).parents[2]).encode()
    for file in unpack(path, tmp_path / "unpacked").iterdir():
        assert here not in file.read_bytes(), file.name
