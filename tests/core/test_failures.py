# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A wrong input is the same named error on every rank, and changes nothing."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from testing.ranks import RankPool
from tests.core import cases, failures, oracle

pytestmark = pytest.mark.quick


def same_on_all(results: list[dict[str, Any]], error: str) -> str:
    """All ranks saw the same error and nothing changed; its text."""
    assert [result["error"] for result in results] == [error] * len(results)
    assert len({result["text"] for result in results}) == 1
    assert all(result["unchanged"] for result in results)
    return str(results[0]["text"])


@pytest.mark.parametrize(
    ("shift", "grow", "error", "says"),
    [(32, 0, "PlanDisagreementError", "ranks 0 and 1 hold the same rows"), (0, 32, "LayoutError", "rank 1")],
)
def test_metadata_that_contradicts_the_shard(
    shift: int, grow: int, error: str, says: str, megatron_ranks: RankPool, tmp_path: Path
) -> None:
    target = tmp_path / "iter_0000001"
    results = megatron_ranks.run(failures.save_with_changed_slice, str(target), shift, grow, ranks=2)
    text = same_on_all(results, error)
    assert says in text
    assert results[0]["key"] in text
    assert cases.names_in(tmp_path) == ["iter_0000001"], "the failed save left something behind"
    assert len(oracle.on_disk(target)) > 0


def test_a_save_over_anything_but_a_checkpoint_is_refused(megatron_ranks: RankPool, tmp_path: Path) -> None:
    """The root in the place of an iteration, the working directory, sources, links; waiting and in the background."""
    runs = tmp_path / "runs"
    for name in (
        "iter_0000001/manifest.json",
        "tensorboard/events",
        "here/x.py",
        "sources/train.py",
        "root/iter_0000001/.metadata",
    ):
        (runs / name).parent.mkdir(parents=True, exist_ok=True)
        (runs / name).write_text(name)
    (runs / "link").symlink_to("iter_0000001")
    (runs / "dangling").symlink_to("gone")
    (runs / "a file").write_text("a file")
    before = sorted(str(path) for path in tmp_path.rglob("*") if "free" not in path.parts)
    says = {
        "sources": "a directory that is no checkpoint, with train.py",
        ".": "a parent of the working directory",
        "root": "a root of checkpoints, with iter_0000001",
        "here": "found the working directory",
        "link": "found a link to",
        "dangling": "found a link to gone, which does not exist",
        "a file": "found a file",
    }
    targets = [str(runs / name) for name in says]
    results = megatron_ranks.run(failures.save_over, targets, str(runs / "here"), ranks=2)
    for target, text in zip(targets, says.values(), strict=True):
        for background in (False, True):
            found = same_on_all([result[f"{target} {background}"] for result in results], "ConfigurationError")
            assert text in found
            assert target in found
    assert sorted(str(path) for path in tmp_path.rglob("*") if "free" not in path.parts) == before
    assert len(oracle.on_disk(runs / "free")) > 0


def test_a_rank_that_does_not_arrive_is_named(megatron_ranks: RankPool, tmp_path: Path) -> None:
    target = tmp_path / "iter_0000001"
    waiting, absent, *others = megatron_ranks.run(failures.save_without_rank_1, str(target), ranks=4)
    assert absent == {}
    for result in (waiting, *others):
        assert result["error"] == "RankMissingError"
        assert f"no sign of rank 1 on {socket.gethostname()}." in result["text"]
        assert result["seconds"] < 25
    assert cases.names_in(tmp_path) == ["iter_0000001.first"]


def test_a_full_disk_on_one_rank_fails_all_and_keeps_the_last_checkpoint(
    megatron_ranks: RankPool, tmp_path: Path
) -> None:
    target = tmp_path / "iter_0000001"
    results = megatron_ranks.run(failures.save_where_rank_1_cannot_write, str(target), ranks=2)
    text = same_on_all(results, "StorageError")
    assert "rank 1" in text
    assert "No space left" in text
    assert cases.names_in(tmp_path) == ["iter_0000001"]
    assert len(oracle.on_disk(target)) > 0


@pytest.mark.parametrize(("saved_layers", "live_layers", "says"), [(1, 2, "missing"), (2, 1, "unexpected")])
def test_a_checkpoint_of_another_model(
    saved_layers: int, live_layers: int, says: str, megatron_ranks: RankPool, tmp_path: Path
) -> None:
    saved, live = (failures.SMALL.on(layers=layers) for layers in (saved_layers, live_layers))
    megatron_ranks.run(cases.train_and_save, str(tmp_path / "c"), saved, ranks=2)
    results = megatron_ranks.run(failures.load_into, str(tmp_path / "c"), live, ranks=2)
    text = same_on_all(results, "KeyMismatchError")
    assert says in text
    assert "layers.1." in text


def test_another_shape_is_named(megatron_ranks: RankPool, tmp_path: Path) -> None:
    megatron_ranks.run(cases.train_and_save, str(tmp_path / "c"), failures.SMALL, ranks=2)
    results = megatron_ranks.run(failures.load_into, str(tmp_path / "c"), failures.SMALL.on(ffn=64), ranks=2)
    text = same_on_all(results, "KeyMismatchError")
    assert "linear_fc1.weight_w: shape [48, 32] in the checkpoint, [64, 32] here" in text


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_a_damaged_file_is_found_before_anything_changes(damage: str, megatron_ranks: RankPool, tmp_path: Path) -> None:
    megatron_ranks.run(cases.train_and_save, str(tmp_path / "c"), failures.SMALL, ranks=2)
    payload = tmp_path / "c" / "__1_0.distcp"
    content = bytearray(payload.read_bytes())
    if damage == "missing":
        payload.unlink()
    elif damage == "truncated":
        payload.write_bytes(content[:-1000])
    else:
        raw = content.find(b"/data/0") + 200  # inside the first chunk's elements
        content[raw] ^= 1
        payload.write_bytes(content)
    results = megatron_ranks.run(failures.load_into, str(tmp_path / "c"), failures.SMALL, ranks=2)
    assert "__1_0.distcp" in same_on_all(results, "DamagedCheckpointError")


def test_a_directory_that_is_no_checkpoint(megatron_ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    results = megatron_ranks.run(failures.load_into, str(tmp_path), failures.SMALL, ranks=2)
    assert "notes.txt" in same_on_all(results, "NotACheckpointError")


def test_the_case_that_hangs_stock_saves(megatron_ranks: RankPool, tmp_path: Path) -> None:
    results = megatron_ranks.run(failures.save_of_the_stock_hang, str(tmp_path / "iter_0000001"), ranks=2)
    assert len({result["states"] for result in results}) == 2, "the ranks hold different numbers of states"
    held = oracle.on_disk(tmp_path / "iter_0000001")
    assert {key: value for key, value in held.items() if not key.endswith(".step")} == results[0]["live"]


def test_an_optimizer_that_would_step_a_stale_copy_says_so(megatron_ranks: RankPool) -> None:
    text = same_on_all(megatron_ranks.run(failures.step_after_memory_was_replaced, ranks=1), "ConfigurationError")
    assert "1 of" in text
    assert "optimizer_offload_fraction" in text
