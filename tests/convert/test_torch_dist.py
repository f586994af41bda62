# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`convert from-torch-dist`: Megatron's own checkpoints become this package's."""

from __future__ import annotations

import argparse
import importlib
import os
import pickle
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mbridge_fsdp_ckpt.dcp import unpickler
from mbridge_fsdp_ckpt.dcp.reader import DcpSource
from mbridge_fsdp_ckpt.errors import UnsupportedStateError
from mbridge_fsdp_ckpt.format.reader import SafeSource
from mbridge_fsdp_ckpt.plan.boxes import Box, whole
from mbridge_fsdp_ckpt.plan.tiling import tiling_defect
from mbridge_fsdp_ckpt.tools.convert.torch_dist.links import Link, Part, block_of, links
from mbridge_fsdp_ckpt.tools.convert.torch_dist.reader import LinkedChunks
from testing.outcomes import RankFailed
from testing.ranks import RankPool
from tests.bridge import training
from tests.bridge.training import Run
from tests.convert import storage_made as made
from tests.convert import storage_torch_dist as runs
from tests.convert.storage_cli import left, refusal
from tests.core import oracle
from tests.models import hugging_face
from tests.models.test_real_models import not_in_bridge
from tests.soak import sampling
from tests.unit import test_cli

BY_PARAMETER = {"checkpoint.dist_ckpt_optim_fully_reshardable": True}


# --- arithmetic ---


def test_halves_of_an_experts_weight() -> None:
    """The example of `torch_dist_links`: expert 1 of 2, rows 0..2 the gate, rows 3..5 the other half."""
    parts = [
        Part(Box((0, 0), (3, 3)), "linear_fc1.weight", (1, 0, 0), (2, 6, 3)),
        Part(Box((3, 0), (3, 3)), "linear_fc1.weight", (1, 3, 0), (2, 6, 3)),
    ]
    assert list(links(Box((3, 0), (3, 3)), Box((0, 0), (3, 3)), parts)) == [
        Link(Box((0, 0), (3, 3)), "linear_fc1.weight", Box((1, 3, 0), (1, 3, 3)))
    ]
    assert list(links(Box((2, 1), (2, 2)), Box((7, 5), (2, 2)), parts)) == [
        Link(Box((7, 5), (1, 2)), "linear_fc1.weight", Box((1, 2, 1), (1, 1, 2))),
        Link(Box((8, 5), (1, 2)), "linear_fc1.weight", Box((1, 3, 1), (1, 1, 2))),
    ]


@given(rows=st.integers(1, 12), cuts=st.sets(st.integers(1, 11)), begin=st.integers(0, 11), size=st.integers(1, 12))
def test_links_cover_a_block_once(rows: int, cuts: set[int], begin: int, size: int) -> None:
    edges = sorted({0, rows, *(cut for cut in cuts if cut < rows)})
    parts = [
        Part(Box((low, 0), (high - low, 2)), f"k{low}", (9, low + 5, 0), (99, 99, 2)) for low, high in pairwise(edges)
    ]
    begin = min(begin, rows - 1)
    size = min(size, rows - begin)
    found = list(links(Box((begin, 0), (size, 2)), Box((30, 0), (size, 2)), parts))
    assert not tiling_defect(Box((30, 0), (size, 2)), [link.here for link in found])
    for link in found:
        assert link.there.offset[0] == 9
        assert link.there.offset[1] - 5 == link.here.offset[0] - 30 + begin
        assert link.there.size == (1, *link.here.size)


@pytest.mark.parametrize(
    ("view", "box"),
    [
        (lambda p: p, Box((0, 0, 0), (4, 3, 2))),
        (lambda p: p[1:3], Box((1, 0, 0), (2, 3, 2))),
        (lambda p: p.chunk(2)[1].chunk(2)[1], Box((3, 0, 0), (1, 3, 2))),
        (lambda p: p[:, 1:, :1], Box((0, 1, 0), (4, 2, 1))),
        (lambda p: p[4:], Box((4, 0, 0), (0, 3, 2))),
    ],
)
def test_a_view_is_a_block(view: object, box: Box) -> None:
    assert callable(view)
    for device in ("cpu", "meta"):
        parameter = torch.empty(4, 3, 2, device=device)
        found = block_of(view(parameter), parameter, "weight")
        assert found.size == box.size
        assert found.offset == box.offset or not box.volume


@pytest.mark.parametrize(
    "view", [lambda p: p.t(), lambda p: p[::2], lambda p: p.reshape(-1), lambda p: p.reshape(3, 4)]
)
def test_another_view_is_refused(view: object) -> None:
    assert callable(view)
    parameter = torch.empty(4, 3, device="meta")
    with pytest.raises(UnsupportedStateError, match="weight"):
        block_of(view(parameter), parameter, "weight")


def test_chunks_are_cut_along_links(tmp_path: Path) -> None:
    """A key of two stacked layers, of which stock's writer made one chunk: leading dimensions may be spanned."""
    made.save_stock(tmp_path / "old", stacked=torch.arange(24.0).reshape(2, 4, 3))
    found = {"k": [Link(Box((0, 0), (2, 3)), "stacked", Box((1, 2, 0), (1, 2, 3)))]}
    chunks = LinkedChunks(DcpSource(tmp_path / "old"), found)
    [chunk] = chunks.chunks(["k"])["k"]
    assert chunk.box == Box((0, 0), (2, 3))
    assert torch.equal(chunks.read(chunk), torch.arange(18.0, 24.0).reshape(2, 3))
    assert not tiling_defect(whole((2, 3)), [chunk.box])


# --- what Bridge trained ---

SAVED = {
    "TP 2": Run("", format="torch_dist", iterations=2, tensor=2, config=BY_PARAMETER),
    "EP 2": Run("", format="torch_dist", iterations=2, expert=2, config=BY_PARAMETER),
}


@pytest.mark.bridge
@pytest.mark.parametrize("name", sampling.drawn("torch_dist runs", list(SAVED), share=2))
def test_training_goes_on_under_megatron_fsdp(name: str, bridge_ranks: RankPool, tmp_path: Path) -> None:
    run = SAVED[name].on(directory=str(tmp_path / "old"))
    bridge_ranks.run(runs.train, run, ranks=2)
    after = tmp_path / "new" / "iter_0000002"
    [report] = bridge_ranks.run(runs.convert, run.directory, str(after), ranks=1)
    assert (report["read"], report["written"], report["tracker"]) == ("torch_dist", "fsdp_dtensor_safe", True)
    expected = {key: oracle.digest(tensor) for key, tensor in runs.expected(tmp_path / "old" / "iter_0000002").items()}
    assert oracle.on_disk(after) == expected
    assert len([key for key in expected if key.endswith(".exp_avg")]) == len([k for k in expected if k[:6] == "model."])
    assert {digest[0] for key, digest in expected.items() if key.startswith("model.")} == {"torch.float32"}
    assert test_cli.data("verify", after)["intact"]
    assert not {"metadata.json", "common.pt"} & set(left(after))
    source = SafeSource(after)
    assert source.metadata.values["opt_param_scheduler"]["num_steps"] == 16
    [first, _] = bridge_ranks.run(
        training.train, run.on(directory=str(tmp_path / "new"), iterations=4, format="fsdp_dtensor_safe"), ranks=2
    )
    assert first["loaded"] == expected
    assert list(first["losses"]) == [3, 4]


@pytest.mark.bridge
def test_stacked_layers_and_weights_alone(bridge_ranks: RankPool, tmp_path: Path) -> None:
    """`dp_reshardable`, Bridge's default, keeps optimizer state by ranks' buffers."""
    run = Run(str(tmp_path / "old"), format="torch_dist", iterations=2, tensor=2)
    bridge_ranks.run(runs.train, run, stacked=True, ranks=2)
    after = tmp_path / "new" / "iter_0000002"
    [report] = bridge_ranks.run(runs.convert, run.directory, str(after), ranks=1)
    assert "optimizer state is left out: dp_reshardable" in report["notes"][-1]
    assert oracle.on_disk(after) == {
        key: oracle.digest(tensor) for key, tensor in runs.expected(tmp_path / "old" / "iter_0000002").items()
    }
    assert SafeSource(after).metadata.sections == ("model",)


# --- what Bridge imported ---

NOT_SHARDED = ("Nemotron-H",)
"""Their gated norm is a stand-in for mamba_ssm's, which needs CUDA: it does not tell Megatron that it is sharded."""


@pytest.mark.bridge
@pytest.mark.parametrize("name", sampling.drawn("torch_dist models", list(hugging_face.MODELS), share=4))
def test_real_models(name: str, bridge_ranks: RankPool, tmp_path: Path) -> None:
    """The same model, once imported by this package, and once saved by Bridge in torch_dist and then converted."""
    expert, tensor = 2 if hugging_face.MODELS[name].has_experts else 1, 1 if name in NOT_SHARDED else 2
    saved = bridge_ranks.run(runs.save_model, name, str(tmp_path), tensor, expert, ranks=2)
    if not saved[0]:
        pytest.skip(not_in_bridge(name))
    after = tmp_path / "new" / "iter_0000000"
    [report] = bridge_ranks.run(runs.convert, str(tmp_path / "torch_dist"), str(after), ranks=1)
    assert report["notes"] == ["the checkpoint has no optimizer state: weights only"]
    imported = next((tmp_path / "imported").glob("iter_*"))
    assert oracle.on_disk(after) == oracle.on_disk(imported)
    assert {k: (e.family, e.component) for k, e in SafeSource(after).metadata.keys.items()} == {
        k: (e.family, e.component) for k, e in SafeSource(imported).metadata.keys.items()
    }


# --- what is refused ---


@pytest.fixture(scope="module")
def imported(bridge_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small torch_dist checkpoint."""
    folder = tmp_path_factory.mktemp("imported")
    bridge_ranks.run(runs.save_model, "Qwen3", str(folder), 1, 1, by_megatron_lm=True, ranks=1)
    return folder / "torch_dist"


@pytest.mark.bridge
@pytest.mark.parametrize("what", ["another model", "no configuration", "no model", "truncated", "common", "common.pt"])
def test_what_cannot_be_converted_is_named(what: str, imported: Path, bridge_ranks: RankPool, tmp_path: Path) -> None:
    old, canary = tmp_path / "old" / "iter_0000000", tmp_path / "canary"
    shutil.copytree(imported / "iter_0000000", old)
    config = old / "run_config.yaml"
    match what:
        case "another model":
            config.write_text(config.read_text().replace("num_layers: 2\n", "num_layers: 3\n"))
        case "no configuration":
            config.unlink()
        case "no model":
            config.write_text(config.read_text().replace("  hidden_size: ", "  hidden_size: x"))
        case "truncated":
            payload = max(old.glob("*.distcp"), key=lambda path: path.stat().st_size)
            payload.write_bytes(payload.read_bytes()[:-5000])
        case "common":
            made.hostile_metadata(old, canary)
        case "common.pt":
            hostile = {"iteration": 0, "args": argparse.Namespace(lr=made.Hostile(canary))}
            (old / "common.pt").write_bytes(made.torch_bytes(hostile))
    [said] = bridge_ranks.run(runs.convert, str(old), str(tmp_path / "new" / "iter_0000000"), fails=True, ranks=1)
    error = {
        "another model": "KeyMismatchError: ",
        "no configuration": "ConfigurationError: ",
        "no model": "ConfigurationError: ",
        "truncated": "DamagedCheckpointError: ",
        "common": "ManifestError: ",
        "common.pt": "DamagedCheckpointError: ",
    }
    assert said.startswith(error[what]), said
    assert left(tmp_path) == ["old"]


@pytest.mark.bridge
def test_nothing_that_a_run_configuration_names_runs_unless_it_is_trusted(
    imported: Path, bridge_ranks: RankPool, tmp_path: Path
) -> None:
    """Bridge's list of allowed targets lets `torch.os.system` through."""
    old, canary = tmp_path / "old" / "iter_0000000", tmp_path / "canary"
    shutil.copytree(imported / "iter_0000000", old)
    config = old / "run_config.yaml"
    runs_a_command = f"model:\n  _target_: torch.os.system\n  command: touch {canary}\n"
    config.write_text(runs_a_command)
    arguments = (runs.convert, str(old), str(tmp_path / "new" / "iter_0000000"))
    [said] = bridge_ranks.run(*arguments, fails=True, trusted=False, ranks=1)
    assert said.startswith("ConfigurationError: ")
    assert "--trust-run-config" in said
    assert left(tmp_path) == ["old"]
    bridge_ranks.run(*arguments, fails=True, ranks=1)
    assert canary.exists()


@pytest.mark.bridge
def test_arguments_of_megatron_lm_are_read_as_data(imported: Path, bridge_ranks: RankPool, tmp_path: Path) -> None:
    """They are a pickled namespace of enumerations and other classes: the whole state was refused.

    Older releases kept it in a file of its own, which goes before what lies among the tensors.
    """
    for name in ("among_tensors", "in_a_file"):
        old, after = imported.parent / "megatron_lm" / name / "iter_0000000", tmp_path / name / "iter_0000000"
        assert (old / "common.pt").exists() == (name == "in_a_file")
        [report] = bridge_ranks.run(runs.convert, str(old), str(after), ranks=1)
        kept = "consumed_train_samples, hidden_size, tokenizer_type"
        assert report["notes"] == [
            "left out, being no plain data: kind",
            f"of Megatron-LM's arguments (args) only what a load reads comes along: {kept}",
            "the checkpoint has no optimizer state: weights only",
        ]
        values = SafeSource(after).metadata.values
        assert (values["checkpoint_version"], values["iteration"]) == (3.0, 0)
        assert values["args"] == {name: runs.ARGUMENTS[name] for name in kept.split(", ")}
        assert oracle.on_disk(after) == oracle.on_disk(next((imported.parent / "imported").glob("iter_*")))
        assert not {"common.pt", "metadata.json"} & set(left(after))
        assert test_cli.data("verify", old)["intact"]
        assert test_cli.data("diff", old, old)["equal"]


class Called:
    """A call of a function where it is unpickled."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def load_state(value: object) -> dict[str, Any]:
    return unpickler.load_state(np.frombuffer(made.torch_bytes(value), dtype=np.uint8))


@pytest.mark.parametrize("nested", [lambda call: {"x": call}, lambda call: {"args": argparse.Namespace(x=[call])}])
@pytest.mark.parametrize(
    "call",
    [
        lambda canary: Called(open, str(canary), "w"),
        lambda canary: Called(os.system, f"touch {canary}"),
        lambda canary: Called(eval, f"open({str(canary)!r}, 'w')"),
        lambda canary: Called(subprocess.call, ["touch", str(canary)]),
        lambda canary: Called(importlib.import_module, "antigravity"),
    ],
)
def test_state_that_runs_code_is_refused(call: Any, nested: Any, tmp_path: Path) -> None:
    with pytest.raises(pickle.UnpicklingError):
        load_state(nested(call(tmp_path / "canary")))
    assert left(tmp_path) == []


def test_classes_that_are_not_known_are_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "somebodys.py").write_text(
        "import enum, pathlib\n"
        "with pathlib.Path(__file__).with_name('imported').open('a') as file: file.write('x')\n"
        "class Kind(enum.Enum):\n    A, B = 1, 2\n"
        "class Thing:\n    def __init__(self): self.a = [1]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    somebodys = importlib.import_module("somebodys")
    states = [
        made.torch_bytes({"args": argparse.Namespace(kind=kind, thing=somebodys.Thing(), w=torch.ones(2))})
        for kind in (somebodys.Kind.A, somebodys.Kind.A, somebodys.Kind.B)
    ]
    monkeypatch.delitem(sys.modules, "somebodys")
    one, same, other = (unpickler.load_state(np.frombuffer(data, dtype=np.uint8))["args"] for data in states)
    assert "somebodys" not in sys.modules
    assert (tmp_path / "imported").read_text() == "x"
    assert repr(one["kind"]) == "somebodys.Kind(1,)"
    assert one["kind"] == same["kind"] != other["kind"]
    assert one["thing"] != same["thing"]  # what cannot be compared is not called equal
    assert torch.equal(one["w"], torch.ones(2))


@pytest.mark.bridge
def test_each_format_has_its_command(imported: Path, tmp_path: Path) -> None:
    for command in (("from-stock",), ("to-stock",), ("reshard", "--ranks", 1)):
        assert "convert from-torch-dist" in refusal(*command, imported, tmp_path / "new")
    made.save_stock(tmp_path / "stock")
    assert "fsdp_dtensor. Use from-stock." in refusal("from-torch-dist", tmp_path / "stock", tmp_path / "new")
    assert left(tmp_path) == ["stock"]


@pytest.mark.bridge
def test_the_tools_check_one_truly(imported: Path, tmp_path: Path) -> None:
    old = tmp_path / "iter_0000000"
    shutil.copytree(imported / "iter_0000000", old)
    found = test_cli.data("verify", old)
    assert found["format"] == "torch_dist"
    assert found["checked"]["keys"] >= 10
    assert test_cli.data("inspect", old)["format"] == "torch_dist"
    same = test_cli.data("diff", old, imported / "iter_0000000")
    assert (same["equal"], same["tensors_compared"]) == (True, found["checked"]["keys"])
    source = DcpSource(old)
    key = max(source.tensors, key=lambda name: source.tensors[name].nbytes)
    [chunk, *_] = source.look_at(key)
    payload = old / chunk.path.name
    made.flip(payload, chunk.record.offset + chunk.record.length // 2)
    assert list(test_cli.data("diff", old, imported / "iter_0000000", code=1)["tensors"]) == [key]
    payload.unlink()
    assert {finding["file"] for finding in test_cli.data("verify", old, code=1)["findings"]} == {payload.name}


@pytest.mark.bridge
def test_verify_reads_the_state_that_is_no_tensor(imported: Path, tmp_path: Path) -> None:
    """Neither the file of older releases nor the entry among the tensors was opened."""
    old = tmp_path / "iter_0000000"
    shutil.copytree(imported.parent / "megatron_lm" / "in_a_file" / "iter_0000000", old)
    common = old / "common.pt"
    whole = common.read_bytes()
    for damaged in (whole[:-100], whole[: len(whole) // 2], b"", whole.replace(b"NullTokenizer", b"NullTokenizes")):
        assert damaged != whole
        common.write_bytes(damaged)
        [finding] = test_cli.data("verify", old, code=1)["findings"]
        assert (finding["subject"], finding["file"]) == ("file", "common.pt")
    common.unlink()
    assert test_cli.data("verify", old)["intact"]
    [chunk] = DcpSource(old).look_at("common_state/shard_0_1")
    made.flip(old / chunk.path.name, (old / chunk.path.name).read_bytes().index(b"NullTokenizer"))
    [finding] = test_cli.data("verify", old, code=1)["findings"]
    assert finding["file"] == chunk.path.name


@pytest.mark.bridge
def test_a_run_in_this_format_says_what_it_is(imported: Path, bridge_ranks: RankPool) -> None:
    """It said that keys were missing, and to load a checkpoint of the same model."""
    with pytest.raises(RankFailed) as caught:
        bridge_ranks.run(training.train, Run(str(imported), iterations=1), ranks=1)
    said = str(caught.value)
    assert "NotACheckpointError" in said
    assert "found a checkpoint in Megatron's format torch_dist" in said
    assert "convert from-torch-dist" in said
    assert "checkpoint.ckpt_format=torch_dist" in said


def test_ranks_are_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "without torchrun" in refusal("from-torch-dist", tmp_path / "old", tmp_path / "new")
    assert left(tmp_path) == []
