# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Stock checkpoints, written by torch itself, are read to the bit without unpickling what could run code."""

import copy
import pickle
import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp

from mbridge_fsdp_ckpt.dcp.reader import DcpSource
from mbridge_fsdp_ckpt.errors import DamagedCheckpointError, ManifestError
from mbridge_fsdp_ckpt.io.ranges import Place, Scratch
from mbridge_fsdp_ckpt.loading.renaming import under_new_names
from mbridge_fsdp_ckpt.opening import open_checkpoint
from tests.unit.shards import shards

NAME, OTHER = "module.module.module.weight", "module.module.module.experts.linear_fc1.weight3_w"
GROUP = {"lr": 1e-4, "betas": (0.9, 0.95), "adam_w_mode": 1, "eps": 1e-8, "bias_correction": True, "params": None}


def stock_state() -> dict[str, Any]:
    """State as Megatron-Bridge hands it to torch for `fsdp_dtensor`."""
    random_states = {
        "random_rng_state": random.Random(3).getstate(),
        "np_rng_state": np.random.RandomState(3).get_state(),
        "torch_rng_state": torch.Generator().manual_seed(3).get_state(),
        "cuda_rng_state": torch.arange(16, dtype=torch.uint8),
        "rng_tracker_states": {"model-parallel-rng": torch.arange(8, dtype=torch.uint8)},
    }
    return {
        "model": {
            "module.weight": torch.arange(12, dtype=torch.bfloat16).reshape(4, 3),
            "module.scale": torch.tensor(2.5),
            "module.experts.linear_fc1.weight3_w": torch.randn(2, 2, generator=torch.Generator().manual_seed(1)),
        },
        "optimizer": {
            "state": {
                NAME: {"exp_avg": torch.full((4, 3), -0.0), "exp_avg_sq": torch.ones(4, 3), "step": torch.tensor(7.0)},
                OTHER: {"exp_avg": torch.zeros(2, 2), "exp_avg_sq": torch.ones(2, 2), "step": torch.tensor(7.0)},
            },
            "param_to_group_meta": {NAME: GROUP, OTHER: GROUP | {"lr": 1e-3}},
        },
        "checkpoint_version": 3.0,
        "iteration": 10,
        "opt_param_scheduler": {"max_lr": 1e-4, "wd_incr_style": "constant", "steps": [1, 2, {"a": 3}]},
        "rng_state": {"(0, 0)": [random_states], "(0, 1)": [random_states]},
        "rerun_state_machine": {"mode": "disabled"},
    }


def write(directory: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=directory, no_dist=True)
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("stock") / "iter_0000010", stock_state())


@pytest.fixture(scope="module")
def source(directory: Path) -> DcpSource:
    source = open_checkpoint(directory)
    assert isinstance(source, DcpSource)
    return source


def test_every_tensor_is_what_torch_loads(directory: Path, source: DcpSource) -> None:
    oracle = {
        key: torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype)) for key, entry in source.metadata.keys.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(oracle, checkpoint_id=directory, no_dist=True)
    assert len(oracle) == 9
    for key, chunks in source.chunks(oracle).items():
        [chunk] = chunks
        found = source.read(chunk)
        assert found.dtype == oracle[key].dtype
        assert found.reshape(-1).view(torch.uint8).tolist() == oracle[key].reshape(-1).view(torch.uint8).tolist()


def test_keys_have_their_shapes_dtypes_and_kinds(source: DcpSource) -> None:
    found = {key: (entry.dtype, entry.shape, entry.kind) for key, entry in source.metadata.keys.items()}
    assert found["model.module.weight"] == ("bfloat16", (4, 3), "sharded")
    assert found["model.module.scale"] == ("float32", (), "sharded")
    assert found[f"optimizer.state.{NAME}.exp_avg"] == ("float32", (4, 3), "sharded")
    assert found[f"optimizer.state.{OTHER}.step"] == ("float32", (), "tensor")


def test_values_are_nested_again(source: DcpSource) -> None:
    state = stock_state()
    assert source.metadata.values == {
        name: state[name] for name in ("checkpoint_version", "iteration", "opt_param_scheduler")
    }
    assert source.metadata.sections == ("model", "optimizer")


def test_hyperparameters_come_back_for_the_names_that_have_some(source: DcpSource) -> None:
    assert source.hyperparameters([NAME, "absent"]) == {NAME: GROUP}
    assert source.hyperparameters([OTHER]) == {OTHER: GROUP | {"lr": 1e-3}}


def test_hyperparameters_that_are_tensors_come_back(tmp_path: Path) -> None:
    """As `capturable` optimizers keep them; stock saves them as tensors of their own."""
    state = stock_state()
    state["optimizer"]["param_to_group_meta"][NAME] = GROUP | {"lr": torch.tensor(1e-4), "betas": torch.ones(2)}
    found = open_checkpoint(write(tmp_path / "it", state)).hyperparameters([NAME])[NAME]
    assert (found["lr"].item(), found["betas"].tolist()) == (torch.tensor(1e-4).item(), [1.0, 1.0])
    assert found.keys() == GROUP.keys()


def test_random_states_come_back_for_each_place(source: DcpSource) -> None:
    records = {(r.coordinates["pipeline"], r.coordinates["tensor"]): r.values for r in source.ranks()}
    assert sorted(records) == [(0, 0), (0, 1)]
    [found] = records[0, 1]["rng_state"]["(0, 1)"]
    [expected] = stock_state()["rng_state"]["(0, 1)"]
    assert found["random_rng_state"] == expected["random_rng_state"]
    assert np.array_equal(found["np_rng_state"][1], expected["np_rng_state"][1])
    assert found["np_rng_state"][0] == "MT19937"
    assert torch.equal(found["torch_rng_state"], expected["torch_rng_state"])
    assert found["rng_tracker_states"]["model-parallel-rng"].tolist() == list(range(8))
    generator = np.random.RandomState()
    generator.set_state(found["np_rng_state"])
    assert generator.normal() == np.random.RandomState(3).normal()


def test_a_model_alone_has_one_section(tmp_path: Path) -> None:
    source = open_checkpoint(write(tmp_path / "weights", {"model": {"weight": torch.ones(2)}}))
    assert source.metadata.sections == ("model",)
    assert source.metadata.values == {}
    assert source.hyperparameters([NAME]) == {}
    assert list(source.ranks()) == []


def test_another_checkpoint_has_another_identity(tmp_path: Path, source: DcpSource) -> None:
    state = copy.deepcopy(stock_state())
    state["model"]["module.weight"] = torch.ones(5, 3, dtype=torch.bfloat16)
    assert open_checkpoint(write(tmp_path / "iter_0000010", state)).metadata.identity != source.metadata.identity


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    directory = write(tmp_path / "iter_0000010", {"model": {"weight": torch.ones(5)}})
    [file] = directory.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    source = open_checkpoint(directory)
    with pytest.raises(DamagedCheckpointError) as caught:
        source.chunks(["model.weight"])
    assert caught.value.key == str(file)


def test_a_record_that_holds_another_tensor_is_named(tmp_path: Path) -> None:
    directory = write(tmp_path / "iter_0000010", {"model": {"weight": torch.ones(6)}})
    [file] = directory.glob("*.distcp")
    size = file.stat().st_size
    [chunk] = (source := open_checkpoint(directory)).chunks(["model.weight"])["model.weight"]
    for stranger in (torch.ones(6, dtype=torch.int32), torch.ones(2, 3), "text"):
        torch.save(stranger, file)
        file.write_bytes(file.read_bytes().ljust(size, b"\0")[:size])
        with pytest.raises(DamagedCheckpointError) as caught:
            source.read(chunk)
        assert caught.value.key == str(file)


def test_a_damaged_record_never_ends_in_an_error_without_a_name(tmp_path: Path) -> None:
    directory = write(tmp_path / "iter_0000010", {"model": {"weight": torch.ones(6)}})
    [file] = directory.glob("*.distcp")
    [chunk] = (source := open_checkpoint(directory)).chunks(["model.weight"])["model.weight"]
    data, refused = file.read_bytes(), 0
    for position in range(chunk.record.offset, chunk.record.end):
        damaged = bytearray(data)
        damaged[position] ^= 0x5A
        file.write_bytes(damaged)
        try:
            source.read(chunk)
        except DamagedCheckpointError:
            refused += 1
    assert refused > 100


def test_metadata_that_is_damaged_or_linked_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path / "iter_0000010", {"model": {"weight": torch.ones(6)}})
    path = directory / ".metadata"
    data = path.read_bytes()
    for content in (b"", data[:-10], b"\x80\x04]\x94.", b"nonsense"):
        path.write_bytes(content)
        with pytest.raises(ManifestError) as caught:
            open_checkpoint(directory)
        assert caught.value.key == str(path)
    path.write_bytes(data)
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    with pytest.raises(ManifestError):
        open_checkpoint(directory)


def test_an_older_name_of_multi_token_prediction_is_read_as_the_newer(tmp_path: Path) -> None:
    old, new = (f"module.mtp.layers.0.{name}.weight" for name in ("mtp_model_layer", "transformer_layer"))
    tensor = torch.arange(6.0).reshape(2, 3)
    optimizer = {"state": {old: {"exp_avg": tensor + 1}}, "param_to_group_meta": {old: {"lr": 0.1}, "b": {"lr": 0.2}}}
    state = {"model": {old: tensor, "b": tensor}, "optimizer": optimizer}
    [held] = shards(0, 6, key=new, shape=(2, 3))
    source = under_new_names(open_checkpoint(write(tmp_path / "iter_0000010", state)), [held.plan])
    assert set(source.metadata.keys) == {f"model.{new}", "model.b", f"optimizer.state.{new}.exp_avg"}
    [chunk] = source.chunks([f"optimizer.state.{new}.exp_avg"])[f"optimizer.state.{new}.exp_avg"]
    assert chunk.key == f"optimizer.state.{new}.exp_avg"
    assert torch.equal(source.read(chunk), tensor + 1)
    memory = np.zeros(12, dtype=np.uint8)
    source.read_part(chunk, Place(8, memory), Scratch())
    assert memory.view(np.float32).tolist() == [3, 4, 5]
    assert source.hyperparameters([new, "absent"]) == {new: {"lr": 0.1}}
    assert source.hyperparameters() == {new: {"lr": 0.1}, "b": {"lr": 0.2}}


def test_one_element_of_any_stride_is_read_where_it_is_wanted(tmp_path: Path) -> None:
    """Its record has the stride."""
    directory, memory = tmp_path / "iter_0000010", np.zeros(4, dtype=np.uint8)
    source = open_checkpoint(write(directory, stock_state() | {"model": {"one": torch.arange(8.0)[3::8]}}))
    [chunk] = source.chunks(["model.one"])["model.one"]
    assert source.read(chunk).stride() == (8,)
    source.read_part(chunk, Place(0, memory), Scratch())
    assert memory.view(np.float32).tolist() == [3.0]


def test_a_value_in_several_chunks_is_read_whole(tmp_path: Path) -> None:
    """A tensor that is no weight and no slot, of which two ranks hold half each, as their one metadata says."""
    halves = {"low": torch.arange(3.0), "high": torch.arange(3.0, 5.0)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"weight": torch.ones(2)}, "more": halves}, checkpoint_id=tmp_path, no_dist=True)
    found = pickle.loads((tmp_path / ".metadata").read_bytes())
    chunks, whole = [], found.state_dict_metadata["more.low"]
    for name, offset in (("low", 0), ("high", 3)):
        entry = found.state_dict_metadata.pop(f"more.{name}")
        chunks.append(replace(entry.chunks[0], offsets=torch.Size([offset])))
        [index] = [index for index in found.storage_data if index.fqn == f"more.{name}"]
        moved = replace(index, fqn="more.whole", offset=torch.Size([offset]))
        found.storage_data[moved] = found.storage_data.pop(index)
        del found.planner_data[f"more.{name}"]
    found.state_dict_metadata["more.whole"] = replace(whole, size=torch.Size([5]), chunks=chunks)
    found.planner_data["more.whole"] = ("more", "whole")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(found))
    assert DcpSource(tmp_path).read_values("more")["more"]["whole"].tolist() == [0, 1, 2, 3, 4]
