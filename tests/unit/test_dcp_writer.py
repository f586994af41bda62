# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What stock reads: torch's own checkpoint reader finds in the added view what the index holds."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from mbridge_fsdp_ckpt.dcp import metadata
from mbridge_fsdp_ckpt.dcp.reader import DcpSource
from mbridge_fsdp_ckpt.dcp.writer import write_dcp_view
from mbridge_fsdp_ckpt.errors import ManifestError, UnsupportedStateError
from mbridge_fsdp_ckpt.format.manifest import read_manifest
from mbridge_fsdp_ckpt.format.names import Files
from mbridge_fsdp_ckpt.format.own_index import RankIndex
from mbridge_fsdp_ckpt.format.payload import number_of
from mbridge_fsdp_ckpt.format.reader import SafeSource
from mbridge_fsdp_ckpt.format.schema import IndexEntry
from mbridge_fsdp_ckpt.format.values import encode
from mbridge_fsdp_ckpt.format.write_results import write_own_index
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from tests.unit import handmade
from tests.unit.handmade import HYPERPARAMETERS, KEYS, NAME, TENSORS, VALUES, WEIGHT

_DTYPES = (torch.float32, torch.int64, torch.bool, torch.bfloat16)
pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")


def _read_by_torch(directory: Path) -> dict[str, Any]:
    """All of a checkpoint, nested as it was."""
    found: dict[str, Any] = {}
    _load_state_dict(
        found, storage_reader=FileSystemReader(directory), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return found


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = handmade.make(tmp_path / "iter_0000010")
    values = VALUES | {"scaler": torch.tensor([3, 4])}
    write_dcp_view(directory, SafeSource(directory), values)
    return directory


def test_torch_assembles_every_tensor(directory: Path) -> None:
    found = {key: torch.zeros_like(tensor) for key, tensor in TENSORS.items()}
    load(found, checkpoint_id=directory, no_dist=True)
    for key, tensor in TENSORS.items():
        assert torch.equal(found[key], tensor)


def test_torch_nests_all_state_as_stock_does(directory: Path) -> None:
    found = _read_by_torch(directory)
    assert torch.equal(found.pop("scaler"), torch.tensor([3, 4]))
    assert found["optimizer"]["param_to_group_meta"] == {NAME: HYPERPARAMETERS}
    assert {name: found[name] for name in VALUES} == VALUES
    assert torch.equal(found["model"]["weight"], TENSORS[WEIGHT])
    assert sorted(found["optimizer"]["state"][NAME]) == ["exp_avg", "step"]
    states = found["rng_state"]
    assert {place: state[0]["torch_rng_state"].tolist() for place, state in states.items()} == {
        "(0, 0)": [0],
        "(0, 1)": [1],
    }


def test_the_view_describes_chunks_as_torch_would(directory: Path) -> None:
    found = FileSystemReader(directory).read_metadata().state_dict_metadata
    weight: Any = found[WEIGHT]
    assert (weight.size, weight.properties.dtype) == (torch.Size([4, 3]), torch.bfloat16)
    assert [(c.offsets, c.sizes) for c in weight.chunks] == [((0, 0), (2, 3)), ((2, 0), (2, 3))]
    assert isinstance(found["iteration"], BytesStorageMetadata)


def test_the_view_reads_like_stock_through_the_safe_reader(directory: Path) -> None:
    source = DcpSource(directory)
    assert {key: (entry.dtype, entry.shape) for key, entry in source.metadata.keys.items()} == {
        key: (entry.dtype, entry.shape) for key, entry in KEYS.items()
    }
    assert source.hyperparameters([NAME]) == {NAME: HYPERPARAMETERS}
    assert source.metadata.values == VALUES


def test_metadata_is_made_anew_only_where_it_says_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a training changes from save to save is in the payload and in the values file, not in `.metadata`."""
    made = lru_cache(maxsize=1)(metadata._made)
    monkeypatch.setattr(metadata, "_kept", made)
    steps: tuple[dict[str, Any], ...] = {"iteration": 7, "lr": 0.5}, {"iteration": 8, "lr": 0.25}, {"iteration": 8}
    times = []
    for number, values in enumerate(steps):
        directory = handmade.make(tmp_path / f"iter_{number}")
        if number:  # another payload of the same size
            handmade.edit_group(directory, lambda part: handmade.rows_of(part, WEIGHT)[0].update(checksum=1))
        write_dcp_view(directory, SafeSource(directory), values)
        found = _read_by_torch(directory)
        assert {name: found[name] for name in ("iteration", "lr") if name in found} == values
        times.append(made.cache_info().misses)
    assert times == [1, 1, 2]


def test_two_values_of_one_key_are_refused(tmp_path: Path) -> None:
    directory = handmade.make(tmp_path / "iter_0000010")
    with pytest.raises(UnsupportedStateError, match=r"model\.weight"):
        write_dcp_view(directory, SafeSource(directory), {"model": {"weight": 1}})
    assert not (directory / ".metadata").exists()


def test_a_callers_own_random_number_state_is_no_hindrance(tmp_path: Path) -> None:
    """Stock nests these by place; what a caller of `save` calls so may be anything, and then is not stock's."""
    directory = handmade.make(tmp_path / "iter_0000010")
    own = {"values": encode({"rng_state": torch.arange(3)}), "extra_state": None}
    handmade.edit(directory, 0, lambda part: part.update(record=json.dumps(own).encode()))
    write_dcp_view(directory, SafeSource(directory), VALUES)
    assert next(iter(DcpSource(directory).ranks())).values["rng_state"].keys() == {"(0, 1)"}


def test_equal_values_are_written_once(directory: Path) -> None:
    storage = FileSystemReader(directory).read_metadata().storage_data
    places = [(info.relative_path, info.offset) for index, info in storage.items() if ".lr" in index.fqn]
    assert len(places) == 1
    all_values = [info for info in storage.values() if info.relative_path == "__0_1.distcp"]
    assert (
        sum({info.offset: info.length for info in all_values}.values()) == (directory / "__0_1.distcp").stat().st_size
    )


def test_a_value_that_many_parameters_share_is_pickled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of thousands of experts' weights has its param group's hyperparameters; equal values may be several."""
    group = {"lr": 1e-4, "betas": (0.9, 0.95), "params": None}
    pickled: list[object] = []
    save: Any = torch.save

    def counting(value: object, file: object) -> None:
        pickled.append(value)
        save(value, file)

    monkeypatch.setattr(torch, "save", counting)
    groups = {f"weight{number}": group for number in range(50)} | {"equal": {"lr": float("1e-4")}}
    directory = handmade.make(tmp_path / "iter_0000010")
    write_dcp_view(directory, SafeSource(directory), {"groups": groups})
    assert [value for value in pickled if isinstance(value, float) and value == 1e-4] == [1e-4, 1e-4]
    found = _read_by_torch(directory)
    assert found["groups"] == groups


def test_equal_numbers_share_a_record_and_torch_finds_them(tmp_path: Path) -> None:
    """Of three dtypes, as optimizers have them: the bytes of 1 in one are another number in the next."""
    values = {f"optimizer.state.weight{n}.step": (int(n % 3 > 0), _DTYPES[n % 4]) for n in range(40)}
    steps = {key: torch.tensor(value, dtype=dtype) for key, (value, dtype) in values.items()}
    keys = {
        key: KeyEntry(dtype=str(step.dtype).removeprefix("torch."), shape=(), kind="tensor")
        for key, step in steps.items()
    }
    directory, files = handmade.make(tmp_path / "iter_0000010"), Files(handmade.SAVE)
    (directory / handmade.index(0)).unlink()
    said = RankIndex(0, {"rank": 0}, None, keys)
    rows = [number_of(key, step) for key, step in steps.items()]
    told = write_own_index(directory, files, said, rows, {})
    metadata = read_manifest(directory).model_copy(update={"index": (IndexEntry.model_validate(told["pending"][0]),)})
    write_dcp_view(directory, SafeSource(directory, manifest=metadata), {})
    found = {key: torch.zeros_like(step) for key, step in steps.items()}
    load(found, checkpoint_id=directory, no_dist=True)
    assert {key: (t.dtype, t.item()) for key, t in found.items()} == {
        key: (t.dtype, t.item()) for key, t in steps.items()
    }
    storage = FileSystemReader(directory).read_metadata().storage_data
    assert len({(info.relative_path, info.offset) for info in storage.values()}) == 2 * len(_DTYPES)


@pytest.mark.parametrize(
    "change",
    [
        lambda part: handmade.rows_of(part, WEIGHT)[0].update(start=[3, 0]),
        lambda part: part["ranks"].pop(),
        lambda part: handmade.key_of(part, WEIGHT).update(entry=7),
    ],
)
def test_an_index_that_contradicts_itself_makes_no_view(tmp_path: Path, change: handmade.Change) -> None:
    directory = handmade.make(tmp_path / "iter_0000010")
    handmade.edit_group(directory, change)
    with pytest.raises(ManifestError):
        write_dcp_view(directory, SafeSource(directory), VALUES)
    assert not (directory / ".metadata").exists()
