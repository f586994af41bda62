# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a directory holds is told by its content, and every tool says it; nothing that nobody checked is called good."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from mbridge_fsdp_ckpt.commit.target import check_replaceable
from mbridge_fsdp_ckpt.dcp.reader import DcpSource
from mbridge_fsdp_ckpt.errors import ConfigurationError, NotACheckpointError
from mbridge_fsdp_ckpt.format.kinds import DirectoryKind
from mbridge_fsdp_ckpt.opening import kind_of, open_checkpoint
from mbridge_fsdp_ckpt.remedies import Frontend, through
from tests.convert.storage_made import save_stock
from tests.trackers import TRACKER, compressed
from tests.unit import handmade
from tests.unit.test_cli import call, data


def saved(directory: Path, state: dict[str, Any], *, flatten: bool = True) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = DefaultSavePlanner(flatten_state_dict=flatten)
        dcp.save(state, checkpoint_id=directory, planner=planner, no_dist=True)
    return directory


def plain(directory: Path, weight: float = 1.0, step: int = 3) -> Path:
    """A checkpoint by torch alone, of somebody's own names."""
    return saved(directory, {"net": {"w": torch.full((4, 3), weight)}, "ema": torch.ones(2), "loop": {"step": step}})


def by_torch_helpers(directory: Path) -> Path:
    """Names as `get_state_dict` of torch makes them, and torchtitan: they begin as stock's do."""
    optimizer = {"state": {"w": {"exp_avg": torch.ones(4)}}, "param_groups": {"w": {"lr": 0.1}}}
    return saved(directory, {"model": {"w": torch.ones(4)}, "optimizer": optimizer})


def torch_dist(directory: Path, weight: float = 1.0, *, told: bool = True) -> Path:
    """As Megatron-Core names keys; without its file where it was lost."""
    state = {
        "decoder.layers.weight": torch.full((4, 3), weight),
        "optimizer.state.exp_avg.decoder.layers.weight": torch.ones(4, 3),
        "common_state/shard_0_1": [{"iteration": 10}],
    }
    saved(directory, state, flatten=False)  # Megatron's non-tensor state is one entry
    if told:
        (directory / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    return directory


def folder(*names: str) -> Callable[[Path], Path]:
    def make(directory: Path) -> Path:
        for name in names:
            path = directory / name
            (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
            if not name.endswith("/"):
                path.write_text("{}")
        return directory

    return make


KINDS: dict[str, tuple[Callable[[Path], Path], DirectoryKind, str]] = {
    "ours": (handmade.make, DirectoryKind.SAFE, ""),
    "stock": (save_stock, DirectoryKind.STOCK, ""),
    "plain DCP": (plain, DirectoryKind.DCP, "a plain checkpoint of torch.distributed.checkpoint"),
    "torch's helpers": (by_torch_helpers, DirectoryKind.DCP, "a plain checkpoint of torch.distributed.checkpoint"),
    "torch_dist": (torch_dist, DirectoryKind.TORCH_DIST, "convert from-torch-dist"),
    "torch_dist by keys": (lambda at: torch_dist(at, told=False), DirectoryKind.TORCH_DIST, "convert from-torch-dist"),
    "legacy": (folder("mp_rank_00/model_optim_rng.pt"), DirectoryKind.LEGACY, "legacy format torch"),
    "VeRL's shards": (folder("model_world_size_2_rank_0.pt"), DirectoryKind.VERL_SHARDS, "verl.model_merger"),
    "a step of VeRL": (folder("actor/model/dist_ckpt/"), DirectoryKind.VERL_STEP, "actor/model/dist_ckpt"),
    "a root": (folder("iter_0000003/"), DirectoryKind.ROOT, "a root of checkpoints: iter_0000003"),
    "Hugging Face": (folder("config.json", "model.safetensors"), DirectoryKind.HUGGING_FACE, "convert import"),
    "another": (folder("notes.txt"), DirectoryKind.OTHER, "notes.txt"),
}


@pytest.mark.parametrize("name", list(KINDS))
def test_a_directory_is_told_by_what_it_holds(name: str, tmp_path: Path) -> None:
    make, kind, says = KINDS[name]
    directory = make(tmp_path / "it")
    assert kind_of(directory) is kind
    if not says:
        assert open_checkpoint(directory).metadata.format == kind
        return
    with pytest.raises(NotACheckpointError) as caught:
        open_checkpoint(directory)
    assert says in str(caught.value)
    looks_at_any = kind in (DirectoryKind.DCP, DirectoryKind.TORCH_DIST)
    for line in (["verify"], ["inspect"], ["diff", directory]):
        done = call(*line, directory)
        assert (done.exit_code == 0) is looks_at_any, (line, done.stdout, done.stderr)
        assert looks_at_any or says in done.stderr, line
    model = folder("config.json")(tmp_path / "model")
    export = ["convert", "export", "--hf-model", model, "--hf-path", tmp_path / "new", "--megatron-path"]
    assert says in call(*export, directory).stderr
    for line in (["convert", "from-stock"], ["convert", "reshard", "--ranks", 1], ["convert", "to-stock"]):
        done = call(*line, directory, tmp_path / "new")
        assert done.exit_code in (1, 2)
        assert says in done.stderr, line
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["stock", "plain DCP", "torch's helpers", "torch_dist by keys"])
def test_a_save_replaces_stocks_and_no_other(name: str, tmp_path: Path) -> None:
    """Whatever had `.metadata` was replaced."""
    make, kind, _ = KINDS[name]
    directory = make(tmp_path / "it")
    if kind is DirectoryKind.STOCK:
        check_replaceable(directory)
        return
    with pytest.raises(ConfigurationError, match="not of stock"):
        check_replaceable(directory)


def test_another_iteration_is_named(tmp_path: Path) -> None:
    handmade.make(tmp_path / "iter_0000010")
    done = call("verify", tmp_path / "iter_0000020")
    assert (done.exit_code, "Beside it are iter_0000010." in done.stderr) == (1, True)


def test_torch_dist_is_named_in_the_words_of_each_door(tmp_path: Path) -> None:
    """106 keys were missing, and the checkpoint was of the same model."""
    directory, said = torch_dist(tmp_path / "iter_0000010"), {}
    for each in Frontend:
        with through(each), pytest.raises(NotACheckpointError, match="format torch_dist") as caught:
            open_checkpoint(directory)
        said[each] = str(caught.value)
    assert "checkpoint.ckpt_format=torch_dist" in said[Frontend.BRIDGE]
    assert "--ckpt-format torch_dist" in said[Frontend.MEGATRON_LM]
    assert "checkpoint.mbridge_config.ckpt_format=torch_dist" in said[Frontend.VERL]
    for each in (Frontend.PYTHON, Frontend.EXPORT, Frontend.COMMAND):
        assert said[each].endswith("from-torch-dist SOURCE DESTINATION.")


@pytest.mark.parametrize("make", [plain, torch_dist, by_torch_helpers])
def test_verify_looks_at_every_tensor_and_value_of_others(make: Callable[[Path], Path], tmp_path: Path) -> None:
    directory = make(tmp_path / "it")
    found = data("verify", directory)
    assert found["checked"] == {"keys": 2, "values": 1}
    assert "has no checksums" in found["notes"][0]
    for path in directory.glob("*.distcp"):
        path.unlink()
    found = data("verify", directory, code=1)
    assert len(found["findings"]) == 3
    assert {finding["file"] for finding in found["findings"]} == {"__0_0.distcp"}


def test_a_truncated_tensor_of_a_name_of_ones_own_is_found(tmp_path: Path) -> None:
    """Beside stock's keys, too."""
    state = {"model": {"weight": torch.ones(2)}, "ema": {"weight": torch.ones(1000)}}
    directory = saved(tmp_path / "it", state)
    assert data("verify", directory)["checked"] == {"keys": 2, "values": 0}
    [payload] = directory.glob("*.distcp")
    payload.write_bytes(payload.read_bytes()[:-900])
    assert [finding["key"] for finding in data("verify", directory, code=1)["findings"]] == ["ema.weight"]


def test_a_checkpoint_without_a_key_is_not_called_good(tmp_path: Path) -> None:
    directory = saved(tmp_path / "it", {})
    assert [finding["found"] for finding in data("verify", directory, code=1)["findings"]] == [
        "none: nothing was checked"
    ]
    done = call("diff", directory, directory)
    assert (done.exit_code, "Nothing was compared." in done.stderr) == (1, True)


def test_diff_compares_every_tensor_and_value_of_others(tmp_path: Path) -> None:
    a = plain(tmp_path / "a")
    assert data("diff", a, a)["tensors_compared"] == 2
    found = data("diff", a, plain(tmp_path / "b", weight=2.0), code=1)
    assert (list(found["tensors"]), found["values"]) == (["net.w"], {})
    found = data("diff", a, plain(tmp_path / "c", step=4), code=1)
    assert (found["tensors"], list(found["values"])) == ({}, ["values.loop.step"])
    one, other = torch_dist(tmp_path / "one"), torch_dist(tmp_path / "other", weight=2.0)
    assert list(data("diff", one, other, code=1)["tensors"]) == ["decoder.layers.weight"]


def test_a_pattern_that_nothing_is_like_compares_nothing(tmp_path: Path) -> None:
    directory = handmade.make(tmp_path / "it")
    for options in ([], ["--no-values"]):
        done = call("diff", directory, directory, "--key", "modle.*", *options)
        assert done.exit_code == 1
        assert "name is like modle.*" in done.stderr


STATE: dict[str, Any] = {"a": 0.1, "samples": torch.tensor([100, 7]), "n": torch.tensor(5)}
CHANGED: dict[str, tuple[str, Any]] = {
    "a learning rate that is a tensor": ("hyperparameters.module.module.weight.lr", {"lr": torch.tensor(0.2)}),
    "the state of reruns": ("values.rerun_state_machine.mode", {"rerun": "validate_results"}),
    "samples": ("values.samples.seen", {"samples": 999}),
    "a tensor beside": ("values.extra", {"extra": torch.tensor([1.0, 3.0])}),
    "train state": ("values.train_state.consumed_train_samples", {"train": 999}),
}


def stock(directory: Path, change: dict[str, Any]) -> Path:
    state = {"lr": torch.tensor(0.1), "rerun": "disabled", "samples": 100, "extra": torch.tensor([1.0, 2.0])} | change
    name = "module.module.weight"
    optimizer = {
        "state": {name: {"exp_avg": torch.ones(4, 3)}},
        "param_to_group_meta": {name: {"lr": state["lr"], "betas": (0.9, 0.95)}},
    }
    save_stock(
        directory,
        optimizer=optimizer,
        rerun_state_machine={"mode": state["rerun"]},
        samples={"seen": state["samples"]},
        extra=state["extra"],
    )
    progress = {"step": torch.tensor(10), "consumed_train_samples": torch.tensor(change.get("train", 100))}
    torch.save(progress, directory / "train_state.pt")
    return directory


@pytest.mark.parametrize("what", list(CHANGED))
def test_other_state_of_stock_is_compared(what: str, tmp_path: Path) -> None:
    name, change = CHANGED[what]
    a, b = stock(tmp_path / "a", {}), stock(tmp_path / "b", change)
    shutil.copytree(a, tmp_path / "copy")
    found = data("diff", a, tmp_path / "copy")
    assert (found["equal"], found["notes"]) == (True, [OF_RANKS])
    assert list(data("diff", a, b, code=1)["values"]) == [name]


OF_RANKS = "not compared, being of single ranks: rng_state"


class Own:
    """What no reader of data makes."""


def test_what_cannot_be_compared_is_named(tmp_path: Path) -> None:
    directory = save_stock(tmp_path / "a", args=Own())
    assert data("diff", directory, directory)["notes"] == ["not compared, being no plain data: args", OF_RANKS]


def test_a_value_in_several_blocks_is_read_whole(tmp_path: Path) -> None:
    """From its first block alone, two that differ in the second looked alike."""
    from tests.unit.test_dcp_hostile import rewrite

    def halve(found: Any) -> None:
        """Describe the two tensors of one row as the rows of one."""
        one, two = found.state_dict_metadata.pop("one"), found.state_dict_metadata.pop("two")
        one.size = torch.Size([2, 3])
        two.chunks[0].offsets = torch.Size([1, 0])
        one.chunks = [*one.chunks, *two.chunks]
        found.state_dict_metadata["opt_param_scheduler.both"] = one
        places = {}
        for index, place in found.storage_data.items():
            if index.fqn in ("one", "two"):
                offset = torch.Size([int(index.fqn == "two"), 0])
                index = type(index)("opt_param_scheduler.both", offset)
            places[index] = place
        found.storage_data = places
        found.planner_data = {**found.planner_data, "opt_param_scheduler.both": ("opt_param_scheduler", "both")}

    state = {"model": {"w": torch.ones(2)}, "one": torch.full((1, 3), 1.0), "two": torch.full((1, 3), 2.0)}
    directory = saved(tmp_path / "it", state)
    rewrite(directory, halve)
    both = open_checkpoint(directory).metadata.values["opt_param_scheduler"]["both"]
    assert both.tolist() == [[1, 1, 1], [2, 2, 2]]


NO_ROOTS = ["plain DCP", "legacy", "VeRL's shards", "a step of VeRL", "Hugging Face", "another"]


@pytest.mark.parametrize("command", [["prune", "--keep", 1], ["repair"]], ids=["prune", "repair"])
def test_what_is_no_root_has_not_been_looked_at(command: list[Any], tmp_path: Path) -> None:
    """A mistyped directory is not one in which there is nothing to do; an empty one may be a run's that begins."""
    for name in NO_ROOTS:
        make, kind, _ = KINDS[name]
        done = call(*command, make(tmp_path / name))
        assert done.exit_code in (1, 2), (name, done.stdout)
        assert kind is DirectoryKind.DCP or "expected the root of a run's checkpoints" in done.stderr, name
    verls = folder("global_step_20/actor/model/dist_ckpt/")(tmp_path / "of VeRL")
    (verls / TRACKER).write_text("20")
    done = call(*command, verls)
    assert "max_actor_ckpt_to_keep" in done.stderr
    assert (done.exit_code, (verls / TRACKER).read_text()) == (1, "20")
    for made in (folder("release/"), folder(".staging-iter_0000010-x/"), lambda at: at.mkdir()):
        made(tmp_path / "root")
        assert call(*command, tmp_path / "root", "--dry-run").exit_code == 0
        shutil.rmtree(tmp_path / "root")


@pytest.mark.parametrize("below", ["actor/model/dist_ckpt", "model/dist_ckpt"])
def test_a_root_of_verls_is_named(below: str, tmp_path: Path) -> None:
    folder(f"global_step_20/{below}/", TRACKER)(tmp_path / "root")
    (tmp_path / "root" / TRACKER).write_text("20")
    assert f"global_step_20/{below}." in call("verify", tmp_path / "root").stderr


def test_bridges_file_of_progress_is_read_once_and_not_if_it_is_compressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.save` compresses nothing: what does could be larger than memory."""
    directory, read, looked = save_stock(tmp_path / "it"), DcpSource.read_train_state, list[DcpSource]()

    def counted(source: DcpSource) -> dict[str, Any]:
        looked.append(source)
        return read(source)

    monkeypatch.setattr(DcpSource, "read_train_state", counted)
    assert call("diff", directory, directory).exit_code == 0
    assert len(looked) == 2, "once of each side"
    state = directory / "train_state.pt"
    state.write_bytes(compressed(state.read_bytes()))
    for line in (["verify"], ["inspect"], ["diff", directory]):
        done = call(*line, directory)
        assert done.exit_code == 1, line
        assert "a compressed record" in done.stdout + done.stderr, line
    assert "a compressed record" in call("convert", "from-stock", directory, tmp_path / "new").stderr
