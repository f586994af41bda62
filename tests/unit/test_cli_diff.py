# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`diff`: what differs is named and counted, however the two are laid out."""

from __future__ import annotations

import copy
import itertools
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from mbridge_fsdp_ckpt.format import source
from mbridge_fsdp_ckpt.format.manifest import read_manifest
from mbridge_fsdp_ckpt.format.names import FORMAT_NAME, Files
from mbridge_fsdp_ckpt.format.own_index import RankIndex
from mbridge_fsdp_ckpt.format.payload import PayloadWriter
from mbridge_fsdp_ckpt.format.schema import VERSION, Manifest
from mbridge_fsdp_ckpt.format.values import encode, hash_of
from mbridge_fsdp_ckpt.format.write_results import count_keys, together, write_group_index, write_own_index
from mbridge_fsdp_ckpt.plan.boxes import Box, whole
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.saving.commit import Job
from mbridge_fsdp_ckpt.settings import Settings
from mbridge_fsdp_ckpt.tools import compare
from mbridge_fsdp_ckpt.tools.compare import same_value
from tests.unit import handmade
from tests.unit.handmade import write_manifest
from tests.unit.shards import shards
from tests.unit.test_cli import call, data
from tests.unit.test_saving import coordination, prepared, saved

NAME = "module.weight"
WEIGHT, AVERAGE, STEP = "model.weight", f"optimizer.state.{NAME}.exp_avg", f"optimizer.state.{NAME}.step"
VALUES = {"iteration": 10, "opt_param_scheduler": {"max_lr": 1e-4, "steps": (1, 2)}}
SAVE = "0123456789ab"
GROUP = {"lr": 0.1, "betas": (0.9, 0.95)}


def tensors() -> dict[str, torch.Tensor]:
    return {
        WEIGHT: torch.arange(70, dtype=torch.bfloat16).reshape(7, 10),
        AVERAGE: torch.linspace(-1, 1, 70).reshape(7, 10),
        STEP: torch.tensor(7.0),
    }


def build(
    directory: Path,
    state: dict[str, torch.Tensor],
    *,
    ranks: int = 1,
    columns: bool = False,
    values: Any = None,
    group: Any = None,
) -> Path:
    """A checkpoint whose tensors are cut into as many blocks as there are ranks: of rows, or of columns."""
    directory.mkdir(parents=True)
    keys = {key: KeyEntry(dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape)) for key, t in state.items()}
    files, told = Files(SAVE), []
    hyperparameters: Any = encode(group or GROUP)
    for rank in range(ranks):
        writer = PayloadWriter(directory / files.payload(rank))
        chunks = []
        for key, tensor in state.items():
            box = _box(tuple(tensor.shape), rank, ranks, int(columns))
            if box is not None:
                block = tensor[box.slices_in(whole(tuple(tensor.shape)))]
                chunks.append(writer.add(key, block.reshape(-1), box))
        hashed = hash_of(hyperparameters)
        held = {chunk.key: keys[chunk.key] for chunk in chunks}
        said = RankIndex(rank, {"rank": rank}, writer.close(), held, {NAME: hashed})
        told.append(write_own_index(directory, files, said, chunks, {hashed: hyperparameters}))
    groups = together(
        write_group_index(directory, files, first, together(told[first : first + 3])) for first in range(0, ranks, 3)
    )
    metadata = Manifest.model_validate(
        {
            "format": FORMAT_NAME,
            "version": VERSION,
            "save": SAVE,
            "writer": {},
            "topology": {"world": ranks},
            "sections": ("model", "optimizer"),
            "keys": count_keys(directory, files, groups),
            **{name: groups[name] for name in ("families", "slots", "hyperparameters", "chunks", "states", "index")},
            "values": encode(VALUES if values is None else values),
        }
    )
    write_manifest(directory / "manifest.json", metadata)
    return directory


def _box(shape: tuple[int, ...], rank: int, ranks: int, along: int) -> Box | None:
    if not shape:
        return Box((), ()) if rank == 0 else None
    low, high = shape[along] * rank // ranks, shape[along] * (rank + 1) // ranks
    offset, size = [0] * len(shape), list(shape)
    offset[along], size[along] = low, high - low
    return Box(tuple(offset), tuple(size)) if high > low else None


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return build(tmp_path / "a" / "iter_0000010", tensors(), ranks=2)


@pytest.mark.parametrize(("ranks", "columns"), [(1, False), (3, False), (7, False), (4, True), (10, True)])
@pytest.mark.parametrize("size", [1, 1 << 26])
def test_another_layout_is_no_difference(
    a: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, columns: bool, size: int
) -> None:
    monkeypatch.setattr(source, "_CHUNKS_KNOWN", size)
    monkeypatch.setattr(compare, "_ELEMENTS", 3)
    b = build(tmp_path / "b", tensors(), ranks=ranks, columns=columns)
    found = data("diff", a, b)
    assert found == {
        "a": str(a),
        "b": str(b),
        "equal": True,
        "only_in_a": [],
        "only_in_b": [],
        "structure": {},
        "tensors": {},
        "values": {},
        "tensors_compared": 3,
        "notes": [],
    }


@pytest.mark.parametrize("columns", [False, True])
def test_unequal_elements_are_counted(a: Path, tmp_path: Path, columns: bool) -> None:
    other = tensors()
    other[WEIGHT][6, 9] = 72  # was 69
    other[WEIGHT][0, 1] = 0.5  # was 1
    other[STEP] = torch.tensor(8.0)
    b = build(tmp_path / "b", other, ranks=3, columns=columns)
    found = data("diff", a, b, code=1)
    assert not found["equal"]
    assert found["tensors"] == {
        WEIGHT: {"unequal": 2, "elements": 70, "max_abs_difference": 3.0},
        STEP: {"unequal": 1, "elements": 1, "max_abs_difference": 1.0},
    }
    shown = call("diff", a, b)
    assert shown.exit_code == 1
    assert shown.stdout.splitlines()[-1] == "Different."
    assert f"\n  {WEIGHT}\n    2 of 70, max |a - b| 3\n" in shown.stdout


NAN = math.nan


@pytest.mark.parametrize(
    ("rtol", "atol", "unequal"), [(0, 0, 3), (0, 0.1, 2), (0, 1, 1), (0.1, 0, 1), (0.5, 0, 1), (0, 10, 0), (2, 0, 0)]
)
def test_a_tolerance_is_that_of_allclose(tmp_path: Path, rtol: float, atol: float, unequal: int) -> None:
    """|a - b| <= atol + rtol * |b|: 0.05 of 1, 0.5 of 10, 5 of 5; a NaN on both sides is equal."""
    one = {"model.x": torch.tensor([1.0, 10.0, 0.0, NAN, 3.0])}
    other = {"model.x": torch.tensor([1.05, 10.5, 5.0, NAN, 3.0])}
    arguments = build(tmp_path / "a", one), build(tmp_path / "b", other), "--rtol", rtol, "--atol", atol
    found = data("diff", *arguments, code=1 if unequal else 0)
    assert sum(entry["unequal"] for entry in found["tensors"].values()) == unequal


def test_keys_shapes_and_dtypes(a: Path, tmp_path: Path) -> None:
    other = tensors() | {"model.new": torch.ones(2), WEIGHT: torch.zeros(7, 11), STEP: torch.tensor(7.0).double()}
    del other[AVERAGE]
    b = build(tmp_path / "b", other)
    for options in ([], ["--no-values"]):
        found = data("diff", a, b, *options, code=1)
        assert (found["only_in_a"], found["only_in_b"]) == ([AVERAGE], ["model.new"])
        assert found["structure"] == {
            WEIGHT: {"a": "bfloat16 [7, 10]", "b": "float32 [7, 11]"},
            STEP: {"a": "float32 []", "b": "float64 []"},
        }
        assert found["tensors"] == {}


def test_other_state_is_compared_by_name(a: Path, tmp_path: Path) -> None:
    values = {"iteration": 20, "opt_param_scheduler": {"max_lr": 1e-4, "steps": [1, 2]}, "new": None}
    b = build(tmp_path / "b", tensors(), values=values, group={"lr": 0.2, "betas": (0.9, 0.95)})
    found = data("diff", a, b, code=1)
    assert found["values"] == {
        "hyperparameters.module.weight.lr": {"a": "0.1", "b": "0.2"},
        "values.iteration": {"a": "10", "b": "20"},
        "values.new": {"a": "(absent)", "b": "None"},
        "values.opt_param_scheduler.steps": {"a": "(a tuple)", "b": "(a list)"},
    }
    assert data("diff", a, b, "--no-values")["equal"]
    assert "Keys, shapes and dtypes are equal." in call("diff", a, b, "--no-values").stdout


def test_a_pattern_leaves_the_rest_out(a: Path, tmp_path: Path) -> None:
    other = tensors() | {AVERAGE: torch.zeros(7, 10)}
    b = build(tmp_path / "b", other, values={"iteration": 20})
    assert data("diff", a, b, "--key", "model.*")["tensors_compared"] == 1
    assert list(data("diff", a, b, "--key", "*.exp_avg", code=1)["tensors"]) == [AVERAGE]
    assert list(data("diff", a, b, "--key", "values.iteration", code=1)["values"]) == ["values.iteration"]


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    found = tensors()
    state = {
        "model": {"weight": found[WEIGHT]},
        "optimizer": {
            "state": {NAME: {"exp_avg": found[AVERAGE], "step": found[STEP]}},
            "param_to_group_meta": {NAME: GROUP},
        },
        "iteration": 10,
        "opt_param_scheduler": {"max_lr": 1e-4, "steps": (1, 2)},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    return tmp_path / "stock"


def test_stock_and_safe_may_be_compared(a: Path, stock: Path, tmp_path: Path) -> None:
    for one, other in ((stock, a), (a, stock), (stock, stock)):
        found = data("diff", one, other)
        assert (found["equal"], found["tensors_compared"], found["notes"]) == (True, 3, [])
    values = VALUES | {"train_state": {"step": 10}, "iteration": 11}
    b = build(tmp_path / "b", tensors() | {STEP: torch.tensor(9.0)}, values=values, group=GROUP | {"lr": 0.2})
    found = data("diff", stock, b, code=1)
    assert list(found["tensors"]) == [STEP]
    assert list(found["values"]) == ["hyperparameters.module.weight.lr", "values.iteration"]
    assert found["notes"] == ["values that one of the formats does not have were not compared: train_state"]


def test_leaves_that_python_calls_equal_are_told_apart(stock: Path, tmp_path: Path) -> None:
    """Stock's pickles may hold complex numbers and sets; those of other types are equal to Python."""
    leaves = [0j, complex(0, -0.0), complex(math.nan, 0), {1}, {True}, {1.0}, {0.0}, {-0.0}, frozenset({1})]
    for one, other in itertools.product(leaves, leaves):
        assert same_value(one, copy.deepcopy(other)) == (one is other), (one, other)
    sides = [tmp_path / "one", tmp_path / "other"]
    for side, value in zip(sides, ({"set": {1}, "z": 0j}, {"set": {True}, "z": complex(0, -0.0)}), strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"model": {"weight": torch.ones(2)}, "more": value}, checkpoint_id=side, no_dist=True)
    assert list(data("diff", *sides, code=1)["values"]) == ["values.more.set", "values.more.z"]


def test_what_was_not_compared_is_named(stock: Path, tmp_path: Path) -> None:
    """Files beside the tensors, and what each rank keeps of its own, differed without a word."""
    other = tmp_path / "other"
    shutil.copytree(stock, other)
    for directory, text in ((stock, "a"), (other, "b")):
        (directory / "run_config.yaml").write_text(text)
        (directory / "same.json").write_text("{}")
    (other / "tokenizer").mkdir()
    (other / "tokenizer" / "vocabulary.txt").write_text("a b c")
    (other / "out").symlink_to("same.json")
    found = data("diff", stock, other)
    named = "files beside the tensors are others, which was not looked into: run_config.yaml, tokenizer/vocabulary.txt"
    assert (found["equal"], found["notes"]) == (True, [named, "not compared, being no plain files: out"])
    sides = [handmade.make(tmp_path / name) for name in ("c", "d")]
    assert data("diff", *sides)["notes"] == ["not compared, being of single ranks: rng_state"]
    (sides[0] / "notes.txt").write_text("which no manifest lists")
    assert data("diff", *sides)["notes"][1].endswith("not looked into: notes.txt")


def test_files_that_saves_without_a_rename_added_are_compared(tmp_path: Path) -> None:
    """They lie in a folder of their save's own, whose names always differ."""
    for name, text in (("one", "a"), ("same", "a"), ("other", "b")):

        def add(folder: Path, text: str = text) -> None:
            (folder / "run_config.yaml").write_text(text)

        settings = Settings(dcp_metadata="never", commit="marker")
        saved(Job(tmp_path / name, settings, coordination(0), {}, add, None), [prepared(shards(0, 12))])
    assert data("diff", tmp_path / "one", tmp_path / "same")["notes"] == []
    [note] = data("diff", tmp_path / "one", tmp_path / "other")["notes"]
    assert note.endswith("not looked into: run_config.yaml")


def test_damaged_bytes_are_a_named_error_not_a_difference(a: Path, tmp_path: Path) -> None:
    b = build(tmp_path / "b", tensors(), ranks=3)
    path = b / "__1_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    shown = call("diff", a, b)
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert shown.stderr.startswith("DamagedCheckpointError: ")
    assert str(path) in shown.stderr


def test_chunks_that_do_not_cover_are_a_named_error(a: Path, tmp_path: Path) -> None:
    b = build(tmp_path / "b", tensors(), ranks=4)
    metadata = read_manifest(b)
    write_manifest(b / "manifest.json", metadata.model_copy(update={"index": metadata.index[:1]}))
    shown = call("diff", a, b)
    assert shown.exit_code == 1
    assert shown.stderr.startswith(f"ManifestError: [{AVERAGE}]") or shown.stderr.startswith("ManifestError: [model")
    assert "uncovered" in shown.stderr


def test_memory_holds_one_chunk_of_each_side(a: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk is read once where rows were cut differently: the one that was read last is remembered."""
    from mbridge_fsdp_ckpt.format.reader import SafeSource

    b = build(tmp_path / "b", tensors(), ranks=3)
    read: list[tuple[str, str, Any]] = []
    original = SafeSource.read

    def counted(self: SafeSource, chunk: Any, **options: Any) -> torch.Tensor:
        read.append((self.metadata.directory.name, chunk.key, chunk.box))
        return original(self, chunk, **options)

    monkeypatch.setattr(SafeSource, "read", counted)
    assert data("diff", a, b)["equal"]
    assert len(read) == len(set(read)) == 2 * 2 + 1 + 2 * 3 + 1
