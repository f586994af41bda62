# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`convert from-stock` and `to-stock`: what Bridge wrote alone, and what it reads alone."""

from __future__ import annotations

import argparse
import io
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from mbridge_fsdp_ckpt.format.reader import SafeSource
from mbridge_fsdp_ckpt.integrations.bridge.run_config import RunConfig
from mbridge_fsdp_ckpt.tools.convert import to_stock
from testing.ranks import RankPool
from tests.convert import storage_made as made
from tests.convert.storage_cli import call, data, left, refusal
from tests.convert.storage_runs import SAFE, STOCK, STRICT, TRACKER, Trained, copied, goes_on_as, resumed
from tests.core import oracle
from tests.unit import handmade, index_bytes, test_cli

PURE = {".metadata", "run_config.yaml", "train_state.pt"}


def values_in(directory: Path) -> dict[str, Any]:
    """Every value that is no tensor, read by torch's own reader and unpickled."""
    reader = FileSystemReader(str(directory))
    metadata = reader.read_metadata()
    names = {k for k, v in metadata.state_dict_metadata.items() if isinstance(v, BytesStorageMetadata)}
    found = {}
    for index, place in metadata.storage_data.items():
        if index.fqn in names:
            with (directory / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                found[index.fqn] = torch.load(io.BytesIO(file.read(place.length)), weights_only=False)
    return found


# --- what Bridge trains ---


@pytest.mark.bridge
def test_training_goes_on_from_a_converted_stock_checkpoint(
    stock_run: Trained, bridge_ranks: RankPool, tmp_path: Path
) -> None:
    after = tmp_path / "iter_0000002"
    found = data("from-stock", stock_run.middle, after)
    assert (found["read"], found["written"], found["files"], found["notes"]) == (STOCK, SAFE, 2, [])
    assert test_cli.data("verify", after)["intact"]
    assert oracle.on_disk(after) == oracle.on_disk(stock_run.middle)
    goes_on_as(stock_run, resumed(bridge_ranks, stock_run, tmp_path, format=SAFE))


@pytest.mark.bridge
def test_every_block_stays_with_its_rank(stock_run: Trained, tmp_path: Path) -> None:
    data("from-stock", stock_run.root, tmp_path / "iter_0000004")
    stored = FileSystemReader(str(stock_run.root / "iter_0000004")).read_metadata().storage_data
    before = {
        (index.fqn, tuple(index.offset), place.relative_path.split("_")[2])
        for index, place in stored.items()
        if index.offset is not None and index.fqn.startswith(("model.", "optimizer.state."))
    }
    after = {(row.key, row.offset, str(row.rank)) for row in made.raw_rows(tmp_path / "iter_0000004")}
    assert after == before
    tensors = oracle.tensors_on_disk(stock_run.root / "iter_0000004")
    arrays = made.raw_arrays(tmp_path / "iter_0000004")
    assert arrays.keys() == tensors.keys()
    assert all((arrays[key] == made.bits(tensor)).all() for key, tensor in tensors.items())


@pytest.mark.bridge
def test_a_converted_stock_checkpoint_says_what_job_it_was(stock_run: Trained, tmp_path: Path) -> None:
    data("from-stock", stock_run.middle, tmp_path / "iter_0000002")
    metadata = json.loads((tmp_path / "iter_0000002" / "manifest.json").read_text())
    assert metadata["topology"] == {
        "tensor": 2,
        "pipeline": 1,
        "context": 1,
        "expert": 1,
        "expert_tensor": 1,
        "strategy": "optim_grads_params",
    }
    source = SafeSource(tmp_path / "iter_0000002")
    assert source.metadata.values["iteration"] == 2
    assert int(source.metadata.values["train_state"]["step"]) == 2
    places = {tuple(record.values["rng_state"]) for record in source.ranks()}
    assert places == {("(0, 0)",), ("(0, 1)",)}
    for name in ("train_state.pt", "run_config.yaml"):
        before, after = (folder / name for folder in (stock_run.middle, tmp_path / "iter_0000002"))
        expected = before.read_bytes()
        if name == "run_config.yaml":
            expected = expected.replace(b"ckpt_format: fsdp_dtensor\n", b"ckpt_format: fsdp_dtensor_safe\n")
            assert expected != before.read_bytes()
        assert after.read_bytes() == expected


@pytest.mark.bridge
def test_stock_goes_on_from_what_was_converted_for_it(
    safe_run: Trained, bridge_ranks: RankPool, tmp_path: Path
) -> None:
    after = tmp_path / "iter_0000002"
    found = data("to-stock", safe_run.middle, after)
    assert (found["read"], found["written"], found["files"]) == (SAFE, STOCK, 2)
    assert set(left(after)) == {*PURE, "__0_0.distcp", "__0_1.distcp", "__1_0.distcp"}
    assert "mbridge_fsdp_ckpt" not in (after / "run_config.yaml").read_text()
    assert b"mbridge_fsdp_ckpt" not in (after / ".metadata").read_bytes()
    assert oracle.on_disk(after) == oracle.on_disk(safe_run.middle)
    goes_on_as(safe_run, resumed(bridge_ranks, safe_run, tmp_path, format=STOCK, config=STRICT))


@pytest.mark.bridge
def test_there_and_back_it_is_the_same(stock_run: Trained, bridge_ranks: RankPool, tmp_path: Path) -> None:
    data("from-stock", stock_run.middle, tmp_path / "safe" / "iter_0000002")
    found = data("to-stock", tmp_path / "safe", tmp_path / "stock" / "iter_0000002")
    assert found["notes"] == []
    after = tmp_path / "stock" / "iter_0000002"
    assert oracle.on_disk(after) == oracle.on_disk(stock_run.middle)
    before, again = values_in(stock_run.middle), values_in(after)
    assert before.keys() == again.keys()
    assert len([key for key in before if key.startswith("optimizer.param_to_group_meta.")]) > 500
    assert all(_same(before[key], again[key]) for key in before)
    for name in ("run_config.yaml", "train_state.pt"):
        assert (after / name).read_bytes() == (stock_run.middle / name).read_bytes()
    goes_on_as(stock_run, resumed(bridge_ranks, stock_run, tmp_path / "stock"))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple | list):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool((one == other) if not hasattr(one, "shape") else (one == other).all())


# --- small ones ---


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / TRACKER).write_text("10")
    return made.save_stock(tmp_path / "old" / "iter_0000010")


@pytest.fixture
def safe(tmp_path: Path) -> Path:
    (tmp_path / "old").mkdir()
    return handmade.make(tmp_path / "old" / "iter_0000010")


def test_what_stock_wrote_comes_along(stock: Path, tmp_path: Path) -> None:
    found = data("from-stock", tmp_path / "old", tmp_path / "new" / "iter_0000010")
    assert found["notes"] == []
    source = SafeSource(tmp_path / "new" / "iter_0000010")
    assert source.metadata.values == {
        "checkpoint_version": 3.0,
        "iteration": 10,
        "opt_param_scheduler": {"max_lr": 1e-4},
        "train_state": {"step": torch.tensor(10)},
    }
    assert source.metadata.sections == ("model", "optimizer")
    assert source.hyperparameters([made.STOCK_NAME]) == {made.STOCK_NAME: {"lr": 0.1, "betas": (0.9, 0.95)}}
    assert source.metadata.keys[f"optimizer.state.{made.STOCK_NAME}.step"].kind == "tensor"
    assert source.metadata.topology == {"tensor": 1, "pipeline": 1, "expert": 4, "strategy": "optim_grads_params"}
    assert [list(record.values) for record in source.ranks()] == [["rng_state"]]
    after = tmp_path / "new" / "iter_0000010"
    assert (after / "tokenizer" / "vocab.txt").read_text() == "a\nb\n"
    assert (after / "run_config.yaml").read_text() == made.CONFIG.replace("fsdp_dtensor\n", "fsdp_dtensor_safe\n")
    assert (tmp_path / "new" / "latest_train_state.pt").read_bytes() == (after / "train_state.pt").read_bytes()
    assert test_cli.data("verify", after)["intact"]


def test_other_state_comes_along_too(tmp_path: Path) -> None:
    made.save_stock(tmp_path / "old", rerun_state_machine={"mode": "off", "counts": [1, 2]})
    data("from-stock", tmp_path / "old", tmp_path / "new")
    assert SafeSource(tmp_path / "new").metadata.values["rerun_state_machine"] == {"mode": "off", "counts": [1, 2]}


def test_hyperparameters_that_are_tensors_come_along(tmp_path: Path) -> None:
    """They were left out as "nothing that a load reads"."""
    name = made.STOCK_NAME
    optimizer = {
        "state": {name: {"exp_avg": torch.ones(4, 3)}},
        "param_to_group_meta": {name: {"lr": torch.tensor(0.1), "betas": (0.9, 0.95)}},
    }
    made.save_stock(tmp_path / "old", optimizer=optimizer)
    assert data("from-stock", tmp_path / "old", tmp_path / "new")["notes"] == []
    found = SafeSource(tmp_path / "new").hyperparameters()[name]
    assert (found["lr"].item(), found["betas"]) == (torch.tensor(0.1).item(), (0.9, 0.95))


def test_what_is_no_data_is_left_out_by_name(tmp_path: Path) -> None:
    made.save_stock(tmp_path / "old", rerun_state_machine={"hooks": made.Hostile(tmp_path / "canary")})
    (tmp_path / "canary").unlink(missing_ok=True)  # torch's own writer may have made it
    [note] = data("from-stock", tmp_path / "old", tmp_path / "new")["notes"]
    assert "1 entry is left out" in note
    assert "rerun_state_machine" in note
    assert left(tmp_path) == ["new", "old"]


def test_it_says_that_arguments_of_megatron_lm_are_left_out(tmp_path: Path) -> None:
    """They were dropped without a word."""
    given = argparse.Namespace(consumed_train_samples=8, lr=0.1, tokenizer_type="NullTokenizer")
    made.save_stock(tmp_path / "old", args=given)
    [note] = data("from-stock", tmp_path / "old", tmp_path / "new")["notes"]
    assert note == (
        "of Megatron-LM's arguments (args) only what a load reads comes along: consumed_train_samples, tokenizer_type"
    )


def test_what_megatron_lm_saved_is_resumed_by_its_own_options(tmp_path: Path) -> None:
    """Bridge leaves a run configuration."""
    given, new = argparse.Namespace(consumed_train_samples=8), tmp_path / "new" / "iter_0000010"
    made.save_stock(tmp_path / "old", args=given)
    assert data("from-stock", tmp_path / "old", tmp_path / "by-bridge")["resume"].startswith("checkpoint.load=")
    (tmp_path / "old" / "run_config.yaml").unlink()
    assert data("from-stock", tmp_path / "old", new)["resume"] == f"--load {tmp_path / 'new'}"
    (tmp_path / "new" / TRACKER).write_text("30")
    assert data("to-stock", new, tmp_path / "back")["resume"] == f"--load {tmp_path / 'back'}"
    shutil.rmtree(tmp_path / "old")
    (tmp_path / "new" / "iter_0000010").rename(tmp_path / "old")
    found = data("reshard", tmp_path / "old", new, "--ranks", "1")
    assert found["resume"] == f"--load {tmp_path / 'new'} --ckpt-step 10"


def test_without_run_files_it_can_be_converted_as_well(tmp_path: Path) -> None:
    old = made.save_stock(tmp_path / "old")
    for name in ("run_config.yaml", "train_state.pt"):
        (old / name).unlink()
    data("from-stock", old, tmp_path / "new")
    assert SafeSource(tmp_path / "new").metadata.topology == {"tensor": 1, "pipeline": 1}


@pytest.mark.parametrize("content", ["a: [", "- 1\n", "checkpoint: 3\n", "checkpoint: {save: x}\n", "\x00"])
def test_a_run_configuration_that_names_no_format_is_carried_over(content: str, stock: Path, tmp_path: Path) -> None:
    (stock / "run_config.yaml").write_text(content)
    [note] = data("from-stock", stock, tmp_path / "new")["notes"]
    assert note == "run_config.yaml names no checkpoint.ckpt_format, and is carried over as it is"
    assert (tmp_path / "new" / "run_config.yaml").read_text() == content


def test_only_the_formats_name_is_changed() -> None:
    config = RunConfig.of(made.CONFIG.encode()).with_format(SAFE)
    assert config.text == made.CONFIG.replace("fsdp_dtensor\n", f"{SAFE}\n")
    assert config.ckpt_format == SAFE
    silent = RunConfig.of(b"checkpoint: {save: here}")
    assert silent.with_format(SAFE) == silent
    quoted = RunConfig.of(b"checkpoint: {'ckpt_format': \"fsdp_dtensor\"}").with_format("b")
    assert quoted.text == "checkpoint: {'ckpt_format': b}"


def test_it_says_what_stock_has_no_place_for(safe: Path, tmp_path: Path) -> None:
    """The two ranks made by hand are two places; a third has other random numbers at the first one's."""
    assert data("to-stock", safe, tmp_path / "a")["notes"] == []
    parts = [index_bytes.decode((safe / handmade.index(rank)).read_bytes()) for rank in (0, 1)]
    parts[1]["coordinates"][0][parts[1]["header"]["axes"].index("tensor")] = 0
    own = json.loads(parts[1]["record"])
    own["values"]["rng_state"]["(0, 0)"] = own["values"]["rng_state"].pop("(0, 1)")
    own["values"]["mine"] = 1
    own["extra_state"] = {"states": {}, "open_rows": {}}
    parts[1]["record"] = json.dumps(own).encode()
    (safe / handmade.index(1)).write_bytes(index_bytes.encode(parts[1]))
    handmade.write_head(safe, parts)
    assert data("to-stock", safe, tmp_path / "b")["notes"] == [
        "random-number states of 1 rank are left out: stock keeps one for each (pipeline, tensor) place",
        "FP8 scaling state is left out: stock starts it afresh",
        "ranks' own values are left out: mine",
    ]


# --- what is refused ---


def test_each_way_wants_its_own_format(stock: Path, tmp_path: Path) -> None:
    data("from-stock", stock, tmp_path / "safe")
    assert "use reshard" in refusal("from-stock", tmp_path / "safe", tmp_path / "new")
    assert "use from-stock" in refusal("to-stock", stock, tmp_path / "new")
    assert "file system" in refusal("to-stock", tmp_path / "safe", "memory://convert/new")
    assert "NotACheckpointError" in refusal("to-stock", tmp_path / "absent", tmp_path / "new")
    assert left(tmp_path) == ["old", "safe"]


def test_an_object_store_can_be_written(stock: Path) -> None:
    found = data("from-stock", stock, "memory://convert/run/iter_0000010")
    assert found["resume"] == "checkpoint.load=memory://convert/run"
    assert test_cli.data("verify", "memory://convert/run")["intact"]


HOSTILE: dict[str, Callable[[Path, Path], object]] = {
    ".metadata": made.hostile_metadata,
    "train_state.pt": lambda old, canary: (old / "train_state.pt").write_bytes(made.torch_bytes(made.Hostile(canary))),
}
NESTED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "scheduler": lambda hostile: {"opt_param_scheduler": {"max_lr": hostile}},
    "random": lambda hostile: {"rng_state": {"(0, 0)": [{"torch_rng_state": hostile}]}},
    "hyperparameter": lambda hostile: {
        "optimizer": {"state": {}, "param_to_group_meta": {"module.x": {"lr": hostile}}}
    },
    "slot": lambda hostile: {"optimizer": {"state": {"module.x": {"exp_avg": hostile}}}},
}


def test_the_trap_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(made.Hostile(tmp_path / "canary"))).close()
    assert left(tmp_path) == ["canary"]


@pytest.mark.parametrize("where", [*HOSTILE, *NESTED])
def test_no_code_of_a_pickle_runs(where: str, tmp_path: Path) -> None:
    canary, old = tmp_path / "canary", tmp_path / "old"
    made.save_stock(old, **(NESTED[where](made.Hostile(canary)) if where in NESTED else {}))
    if where in HOSTILE:
        HOSTILE[where](old, canary)
    canary.unlink(missing_ok=True)  # torch's own writer may have made it
    said = refusal("from-stock", old, tmp_path / "new")
    assert said.startswith(("ManifestError: ", "DamagedCheckpointError: ", "UnsupportedStateError: ")), said
    assert left(tmp_path) == ["old"]


def test_no_code_of_a_yaml_file_runs(stock: Path, tmp_path: Path) -> None:
    config = f"checkpoint: {{ckpt_format: fsdp_dtensor, x: !!python/object/apply:os.mkdir [{tmp_path / 'canary'}]}}\n"
    (stock / "run_config.yaml").write_text(config)
    data("from-stock", stock, tmp_path / "new")
    assert left(tmp_path) == ["new", "old"]


@pytest.mark.parametrize("link", ["run_config.yaml", "tokenizer/more.txt", "folder"])
def test_links_are_refused(link: str, stock: Path, tmp_path: Path) -> None:
    (stock / link).unlink(missing_ok=True)
    (stock / link).symlink_to("/etc" if link == "folder" else "/etc/hostname")
    said = refusal("from-stock", stock, tmp_path / "new")
    assert said.startswith("DamagedCheckpointError: ")
    assert "a symbolic link" in said
    assert left(tmp_path) == ["old"]


@pytest.mark.parametrize("direction", ["from-stock", "to-stock"])
@pytest.mark.parametrize("what", ["truncated", "missing", "metadata"])
def test_damage_is_named_and_leaves_nothing(direction: str, what: str, tmp_path: Path) -> None:
    old = (made.save_stock if direction == "from-stock" else handmade.make)(tmp_path / "old")
    payload, metadata = old / "__0_0.distcp", old / (".metadata" if direction == "from-stock" else "manifest.json")
    match what:
        case "truncated":
            payload.write_bytes(payload.read_bytes()[:-3000])
        case "missing":
            payload.unlink()
        case "metadata":
            metadata.write_bytes(metadata.read_bytes()[: metadata.stat().st_size // 2])
    said = refusal(direction, old, tmp_path / "new" / "iter_0000010")
    assert said.startswith(("DamagedCheckpointError: ", "ManifestError: ")), said
    assert left(tmp_path) == ["old"]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("__1_0.distcp", "DamagedCheckpointError"),
        ("rank_00000.index", "ManifestError"),
        ("group_00000.index", "ManifestError"),
    ],
)
def test_a_flipped_bit_never_reaches_stock(name: str, error: str, safe: Path, tmp_path: Path) -> None:
    for file, position in made.positions(safe, [name]):
        made.flip(safe / file, position)
    assert refusal("to-stock", safe, tmp_path / "new").startswith(f"{error}: ")
    assert left(tmp_path) == ["old"]


@pytest.mark.bridge
def test_a_flipped_bit_in_a_run_file_is_named(safe_run: Trained, tmp_path: Path) -> None:
    old = copied(safe_run.middle, tmp_path / "old")
    made.flip(old / "run_config.yaml", 100)
    assert "run_config.yaml" in refusal("to-stock", old, tmp_path / "new")
    assert left(tmp_path) == ["old"]


@pytest.mark.parametrize("direction", ["from-stock", "to-stock"])
def test_an_interruption_leaves_nothing(direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    old = (made.save_stock if direction == "from-stock" else handmade.make)(tmp_path / "old")
    if direction == "to-stock":
        monkeypatch.setattr(to_stock, "_flush", interrupt)
    else:
        monkeypatch.setattr("mbridge_fsdp_ckpt.format.payload.PayloadWriter.add_pieces", interrupt)
    assert call(direction, old, tmp_path / "new" / "iter_0000010").exit_code == 130
    assert left(tmp_path) == ["old"]
