# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`convert reshard`: other files, the same checkpoint."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mbridge_fsdp_ckpt.format.names import rank_of_payload
from mbridge_fsdp_ckpt.format.payload import PayloadWriter
from mbridge_fsdp_ckpt.format.reader import SafeSource
from mbridge_fsdp_ckpt.plan.boxes import Box, whole
from mbridge_fsdp_ckpt.plan.tiling import tiling_defect
from mbridge_fsdp_ckpt.tools.audit import Audit
from mbridge_fsdp_ckpt.tools.convert import rewrite
from mbridge_fsdp_ckpt.tools.convert.shares import even_shares
from testing.ranks import RankPool
from tests.bridge.training import train
from tests.convert import storage_made as made
from tests.convert.storage_cli import call, data, left, refusal
from tests.convert.storage_runs import SAFE, TRACKER, Trained, copied, goes_on_as, resumed
from tests.core import oracle
from tests.soak.test_disk import mounted
from tests.unit import handmade, index_bytes, test_cli

SHAPES = st.lists(st.integers(0, 12), max_size=3).map(tuple)


# --- which writer gets what ---


def test_an_even_split_and_who_begins() -> None:
    """crc32(b"a") = 3904355907 = 3 * 1301451969 + 0, so that writer 0 begins."""
    assert list(even_shares("a", (5, 3), 4, 3)) == [
        (0, Box((0, 0), (1, 3))),
        (1, Box((1, 0), (2, 3))),
        (2, Box((3, 0), (2, 3))),
    ]
    assert list(even_shares("a", (2,), 4, 3)) == [(0, Box((0,), (1,))), (1, Box((1,), (1,)))]
    assert list(even_shares("a", (), 4, 3)) == [(0, Box((), ()))]
    assert list(even_shares("a", (3, 0), 4, 3)) == []


def test_a_share_is_cut_into_blocks_of_bounded_size() -> None:
    """Rows of 12 bytes, 30 at a time: two; a row of 40 bytes is cut itself."""
    blocks = [(writer, box.offset[0], box.size[0]) for writer, box in even_shares("a", (9, 3), 4, 2, largest=30)]
    assert [(offset, size) for _, offset, size in blocks] == [(0, 2), (2, 2), (4, 1), (5, 2), (7, 2)]
    assert [writer for writer, _, _ in blocks] == [1, 1, 0, 0, 0]
    assert [box.size for _, box in even_shares("a", (2, 10), 4, 1, largest=30)] == [(1, 5)] * 4


@given(key=st.text(max_size=5), shape=SHAPES, writers=st.integers(1, 9), largest=st.integers(1, 200))
def test_shares_tile_every_tensor_evenly_and_in_order(
    key: str, shape: tuple[int, ...], writers: int, largest: int
) -> None:
    shares = list(even_shares(key, shape, 2, writers, largest))
    boxes = [box for _, box in shares]
    assert not tiling_defect(whole(shape), boxes)
    assert boxes == sorted(boxes, key=lambda box: box.offset)
    assert all(box.volume and (box.volume * 2 <= max(2, largest)) for box in boxes)
    if shape:
        elements = Counter[int]()
        for writer, box in shares:
            elements[writer] += box.volume
        assert set(elements) <= set(range(writers))
        used = min(writers, shape[0]) if np.prod(shape) else 0
        assert len(elements) == used
        assert max(elements.values(), default=0) - min(elements.values(), default=0) <= np.prod(shape[1:]), "one row"


def test_short_tensors_spread_over_all_writers() -> None:
    got = Counter(next(even_shares(f"scalar.{number}", (), 4, 8))[0] for number in range(4000))
    assert sorted(got) == list(range(8))
    assert max(got.values()) < 1.2 * min(got.values())


@pytest.mark.parametrize(
    ("name", "rank"), [("__3_0.distcp", 3), ("__12_7.distcp", 12), ("__0_0-0123456789ab.distcp", 0), ("x", 0)]
)
def test_whose_file_it_is(name: str, rank: int) -> None:
    assert rank_of_payload(name) == rank


# --- any tiling becomes any other ---

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


@st.composite
def _tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    found = {}
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(1, 7), max_size=3).map(tuple))
        dtype = draw(st.sampled_from(DTYPES))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
        found[f"model.t{number}"] = torch.randint(-9, 9, shape, generator=generator).to(dtype)
    return found


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tensors=_tensors(),
    ranks=st.integers(1, 4),
    writers=st.integers(1, 6),
    depth=st.integers(0, 4),
    kept=st.sampled_from([0, 40, 1 << 20]),
    seed=st.randoms(use_true_random=False),
)
def test_any_tiling_becomes_an_even_one(
    tensors: dict[str, torch.Tensor],
    ranks: int,
    writers: int,
    depth: int,
    kept: int,
    seed: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("tilings")
    before = made.save_tiled(folder / "iter_0000010", tensors, ranks, depth, seed.randrange)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewrite, "KEPT_BYTES", kept)
        patch.setattr(rewrite, "_OPEN_FILES", 2)
        found = data("reshard", before, folder / "new" / "iter_0000010", "--ranks", writers)
    after = folder / "new" / "iter_0000010"
    arrays = made.raw_arrays(after)
    assert arrays.keys() == tensors.keys()
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(arrays[key], made.bits(tensor), strict=True)
    expected = {
        (writer, key, box.offset, box.size)
        for key, tensor in tensors.items()
        for writer, box in even_shares(key, tuple(tensor.shape), tensor.element_size(), writers)
    }
    got = {(row.rank, row.key, row.offset, row.size) for row in made.raw_rows(after)}
    assert got == expected
    assert list(Audit(after).findings()) == []
    assert found["files"] == len({writer for writer, *_ in expected}) == len(list(after.glob("__*_0.distcp")))
    assert (before / "manifest.json").exists()


# --- a checkpoint made by hand ---


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "old").mkdir()
    handmade.make(tmp_path / "old" / "iter_0000010")
    (tmp_path / "old" / TRACKER).write_text("10")
    return tmp_path


def records(directory: Path) -> list[Any]:
    """What every saving rank said of itself."""
    found = []
    for path in sorted(directory.glob("rank_*.index")):
        file = index_bytes.decode(path.read_bytes())
        coordinates = dict(zip(file["header"]["axes"], file["coordinates"][0], strict=True))
        own = {"extra_state": None} | json.loads(file["record"])
        found.append((file["ranks"][0]["rank"], coordinates, own["values"], own["extra_state"]))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_what_ranks_said_of_themselves_is_kept(root: Path, ranks: int) -> None:
    before, after = root / "old" / "iter_0000010", root / "new" / "iter_0000010"
    data("reshard", root / "old", after, "--ranks", ranks)
    assert records(after)[:2] == records(before)
    assert [record[1:] for record in records(after)[2:]] == [({"rank": rank}, None, None) for rank in range(2, ranks)]
    old, new = SafeSource(before), SafeSource(after)
    for said in ("values", "topology", "sections", "keys"):
        assert getattr(new.metadata, said) == getattr(old.metadata, said)
    stateless = ({name for record in source.ranks() for name in record.stateless} for source in (old, new))
    assert [*stateless] == [{"module.module.frozen0", "module.module.frozen1"}] * 2
    assert new.hyperparameters([handmade.NAME]) == {handmade.NAME: handmade.HYPERPARAMETERS}
    assert test_cli.data("verify", after)["intact"]


def test_records_can_be_merged(tmp_path: Path) -> None:
    """Of four saving ranks, two have the same (pipeline, tensor) place each."""
    tensors = {"model.weight": torch.arange(40.0).reshape(20, 2)}
    made.save_tiled(tmp_path / "iter_0000010", tensors, 4, 3, lambda below: below // 2)
    kept = data("reshard", tmp_path / "iter_0000010", tmp_path / "a" / "iter_0000010", "--ranks", 1)
    merged = data("reshard", tmp_path / "iter_0000010", tmp_path / "b" / "iter_0000010", "--ranks", 1, "--merge-ranks")
    assert kept["notes"] == []
    assert "of 2 saving ranks is left out" in merged["notes"][0]
    assert [values for _, _, values, _ in records(tmp_path / "a" / "iter_0000010")] == [{"rank": n} for n in range(4)]
    assert [values for _, _, values, _ in records(tmp_path / "b" / "iter_0000010")] == [{"rank": 0}, {"rank": 1}]


def test_it_says_what_it_did(root: Path) -> None:
    before, after = root / "old" / "iter_0000010", root / "new" / "iter_0000010"
    shown = call("reshard", root / "old", after, "--ranks", 1, columns=400)
    assert shown.exit_code == 0
    assert shown.stdout.splitlines() == [
        str(after),
        "format        fsdp_dtensor_safe",
        f"from          {before} (fsdp_dtensor_safe)",
        "holds         4 keys, 100 bytes in 1 file",
        f"resume with   checkpoint.load={root / 'new'}",
    ]
    assert (root / "new" / TRACKER).read_text() == "10"


def test_a_tracker_that_is_there_stays(root: Path) -> None:
    iteration = root / "old" / "iter_0000010"
    found = data("reshard", iteration, root / "old" / "few", "--ranks", 1)
    assert found["resume"] == f"checkpoint.load={root / 'old' / 'few'}"
    (root / "new").mkdir()
    (root / "new" / TRACKER).write_text("30")
    found = data("reshard", iteration, root / "new" / "iter_0000010", "--ranks", 1)
    assert not found["tracker"]
    assert found["resume"] == f"checkpoint.load={root / 'new'} checkpoint.ckpt_step=10"
    assert found["notes"] == [f"the tracker in {root / 'new'} names iter_0000030, and was left as it is"]
    assert (root / "new" / TRACKER).read_text() == "30"
    assert sorted(p.name for p in (root / "old").glob("latest*")) == [TRACKER]


# --- what is refused ---


def test_nothing_is_overwritten(root: Path) -> None:
    iteration = root / "old" / "iter_0000010"
    before = {path: path.read_bytes() for path in iteration.iterdir()}
    said = refusal("reshard", root / "old", iteration, "--ranks", 1)
    assert said.startswith("ConfigurationError: ")
    assert f"such as {iteration}-converted" in said
    (root / "empty").mkdir()
    assert f"such as {root / 'empty' / 'iter_0000010'}" in refusal("reshard", iteration, root / "empty", "--ranks", 1)
    assert {path: path.read_bytes() for path in iteration.iterdir()} == before
    assert left(root) == ["empty", "old"]


@pytest.mark.parametrize(
    ("destination", "said"),
    [("new/iter_0000020", "iter_0000010"), ("old/iter_0000010/inside", "outside of the checkpoint")],
)
def test_a_wrong_destination_is_refused(root: Path, destination: str, said: str) -> None:
    assert said in refusal("reshard", root / "old", root / destination, "--ranks", 1)
    assert left(root) == ["old"]
    assert "inside" not in left(root / "old" / "iter_0000010")


@pytest.mark.parametrize("options", [(), ("--ranks", "0"), ("--ranks", "two")])
def test_the_number_of_ranks_has_to_be_given(root: Path, options: tuple[str, ...]) -> None:
    assert call("reshard", root / "old", root / "new", *options).exit_code == 2
    assert left(root) == ["old"]


def test_what_came_to_be_meanwhile_is_not_replaced(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    after, add = root / "new" / "iter_0000010", PayloadWriter.add_pieces

    def add_and_interfere(self: PayloadWriter, *arguments: Any) -> Any:
        after.mkdir(exist_ok=True)
        (after / "precious").write_text("not yours")
        return add(self, *arguments)

    monkeypatch.setattr(PayloadWriter, "add_pieces", add_and_interfere)
    assert "ConfigurationError" in refusal("reshard", root / "old", after, "--ranks", 1)
    assert left(after) == ["precious"]
    assert left(root / "new") == ["iter_0000010"]


@pytest.mark.parametrize("command", [("reshard", "--ranks", "3"), ("to-stock",)], ids=lambda words: words[0])
def test_a_full_disk_is_named_and_leaves_nothing(command: tuple[str, ...], root: Path) -> None:
    verb, *options = command
    old, before = root / "old", content(root / "old")
    with mounted(root / "disk", "size=16k"):
        said = refusal(verb, old, root / "disk" / "new" / "iter_0000010", *options)
        assert left(root / "disk") == []
        gc.collect()  # files that the error still refers to
    for part in ("StorageError: ", f"converting {old}/iter_0000010 to {root}/disk/new/iter_0000010", "No space left"):
        assert part in said
    assert content(old) == before


def test_a_tracker_that_cannot_be_written_fails_no_conversion(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is there, and whole: it was reported as a failure, and could not be made again."""

    def refused(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mbridge_fsdp_ckpt.commit.trackers.replace_file", refused)
    found = data("reshard", root / "old", root / "new" / "iter_0000010", "--ranks", 1)
    assert (found["tracker"], left(root / "new")) == (False, ["iter_0000010"])
    assert found["resume"] == f"checkpoint.load={root / 'new'} checkpoint.ckpt_step=10"
    [note] = found["notes"]
    assert "could not be written (OSError: [Errno 28] No space left on device)" in note


def content(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


# --- damage, interruption, death ---


def damaged(directory: Path, what: str) -> None:
    payload = directory / handmade.payload(1)
    match what:
        case "a bit":
            made.flip(payload, payload.stat().st_size // 3)
        case "truncated":
            payload.write_bytes(payload.read_bytes()[:-1])
        case "no payload":
            payload.unlink()
        case "index of a rank":
            made.flip(directory / handmade.index(1), 40)
        case "index of the group":
            made.flip(directory / handmade.GROUP, 40)
        case "manifest":
            made.flip(directory / "manifest.json", 300)
        case "a hole":
            handmade.write_head(directory, [handmade.make_rank(directory / "..", 0)])
            for name in (handmade.payload(0), handmade.index(0)):
                (directory / ".." / name).unlink()
        case "a link":
            (directory / "notes.txt").symlink_to("/etc/hostname")


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("a bit", "DamagedCheckpointError"),
        ("truncated", "DamagedCheckpointError"),
        ("no payload", "DamagedCheckpointError"),
        ("index of a rank", "ManifestError"),
        ("index of the group", "ManifestError"),
        ("manifest", "ManifestError"),
        ("a hole", "ManifestError"),
        ("a link", "DamagedCheckpointError"),
    ],
)
def test_damage_is_named_and_leaves_nothing(root: Path, what: str, error: str) -> None:
    damaged(root / "old" / "iter_0000010", what)
    said = refusal("reshard", root / "old", root / "new" / "iter_0000010", "--ranks", 3)
    assert said.startswith(f"{error}: "), said
    assert left(root) == ["old"]
    assert left(root / "old") == ["iter_0000010", TRACKER]


def test_an_interruption_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: PayloadWriter, *arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(PayloadWriter, "close", interrupt)
    assert call("reshard", root / "old", root / "new" / "iter_0000010", "--ranks", 3).exit_code == 130
    assert left(root) == ["old"]


DIES = """
import os, signal, sys
from mbridge_fsdp_ckpt.format.payload import PayloadWriter
from tests.convert.storage_cli import app
PayloadWriter.close = lambda self: os.kill(os.getpid(), signal.SIGKILL)
app(sys.argv[1:])
"""


def test_repair_removes_what_a_killed_one_leaves(root: Path) -> None:
    command = [sys.executable, "-c", DIES, "reshard", str(root / "old"), str(root / "new" / "iter_0000010")]
    died = subprocess.run([*command, "--ranks", "2"], cwd=Path(__file__).parents[2], check=False, timeout=120)
    assert died.returncode == -signal.SIGKILL
    [staging] = left(root / "new")
    assert staging.startswith(".staging-iter_0000010-")
    test_cli.data("repair", root / "new", "--force", "--yes")
    assert left(root / "new") == []
    data("reshard", root / "old", root / "new" / "iter_0000010", "--ranks", 2)


MEASURED = """
import resource, sys
from tests.convert.storage_cli import app
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
small, large, folder = sys.argv[1:]
app(["reshard", small, folder + "/small", "--ranks", "3"], standalone_mode=False)
before = peak()
app(["reshard", large, folder + "/large", "--ranks", "3"], standalone_mode=False)
print("GREW", peak() - before)
"""


def test_memory_is_bounded(tmp_path: Path) -> None:
    """A checkpoint of 384 MiB in blocks of 12 MiB, rewritten into blocks of 64 MiB, of which at most one is held."""
    rows = {"small": 12, "large": 12 * 1024}
    for name, count in rows.items():
        tensors = {f"model.t{n}": torch.full((count, 2048), float(n)) for n in range(4)}
        made.save_tiled(tmp_path / name, tensors, 4, 3, lambda below: (below - 1) // 2)
    arguments = [str(tmp_path / name) for name in rows]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *arguments, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    grew = int(done.stdout.split("GREW ")[1])
    assert grew < 160, "MiB; the checkpoint has 384"


# --- what Bridge saved ---


@pytest.mark.bridge
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_every_tensor_of_a_real_checkpoint_is_the_same(safe_run: Trained, ranks: int, tmp_path: Path) -> None:
    after = tmp_path / "iter_0000002"
    data("reshard", safe_run.middle, after, "--ranks", ranks)
    assert oracle.on_disk(after) == oracle.on_disk(safe_run.middle)
    assert len(list(after.glob("__*_0.distcp"))) == ranks
    sizes = [path.stat().st_size for path in after.glob("__*_0.distcp")]
    assert max(sizes) < 1.25 * min(sizes)
    assert test_cli.data("verify", after)["intact"]
    assert test_cli.data("diff", safe_run.middle, after)["equal"]


@pytest.mark.bridge
def test_training_goes_on_from_it_bit_for_bit(safe_run: Trained, bridge_ranks: RankPool, tmp_path: Path) -> None:
    data("reshard", safe_run.middle, tmp_path / "iter_0000002", "--ranks", 5)
    goes_on_as(safe_run, resumed(bridge_ranks, safe_run, tmp_path))


@pytest.mark.bridge
def test_it_loads_in_another_layout(safe_run: Trained, bridge_ranks: RankPool, tmp_path: Path) -> None:
    data("reshard", safe_run.middle, tmp_path / "iter_0000002", "--ranks", 3, "--merge-ranks")
    again = safe_run.run.on(directory=str(tmp_path), iterations=3, save_every=3, tensor=2, expert=2)
    [first, *_] = bridge_ranks.run(train, again, ranks=4)
    assert first["loaded"] == oracle.on_disk(safe_run.middle)
    assert list(first["losses"]) == [3]


@pytest.mark.bridge
def test_stock_checkpoints_can_be_resharded(stock_run: Trained, bridge_ranks: RankPool, tmp_path: Path) -> None:
    found = data("reshard", stock_run.root, tmp_path / "new" / "iter_0000004", "--ranks", 1)
    assert (found["read"], found["written"], found["files"]) == ("fsdp_dtensor", "fsdp_dtensor_safe", 1)
    data("reshard", stock_run.middle, tmp_path / "iter_0000002", "--ranks", 3)
    stored = oracle.on_disk(stock_run.middle)
    assert oracle.on_disk(tmp_path / "iter_0000002") == stored
    again = stock_run.run.on(directory=str(tmp_path), iterations=3, save_every=3, tensor=1, expert=2, format=SAFE)
    [first, *_] = bridge_ranks.run(train, again, ranks=4)
    assert first["loaded"] == stored, "in another layout"


@pytest.mark.bridge
def test_a_bit_of_a_real_checkpoint_is_missed_by_nobody(safe_run: Trained, tmp_path: Path) -> None:
    damaged_copy = copied(safe_run.middle, tmp_path)
    for name, position in made.positions(damaged_copy, ["__1_0.distcp", "run_config.yaml", "rank_00001.index"]):
        made.flip(damaged_copy / name, position)
        said = refusal("reshard", damaged_copy, tmp_path / "new" / "iter_0000002", "--ranks", 2)
        assert said.startswith("ManifestError: " if name.endswith(".index") else "DamagedCheckpointError: ")
        assert name in said
        made.flip(damaged_copy / name, position)
    assert left(tmp_path) == ["iter_0000002"]
