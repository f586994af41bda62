# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Ranks that hold copies read for each other: the same state as if each had read for itself, and every byte once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from mbridge_fsdp_ckpt.opening import open_checkpoint
from mbridge_fsdp_ckpt.plan.records import LARGEST_RECORD
from testing.models import Recipe
from testing.ranks import RankPool
from tests.core import cases, sharing
from tests.soak import sampling

WORLD = 4
MODEL = Recipe(layers=2, experts=4)
LAYOUTS: dict[str, Recipe] = {
    "hybrid": MODEL.on(instances=2),
    "TP 2": MODEL.on(tensor=2),
    "no_shard": MODEL.on(strategy="no_shard"),
    "no_shard, TP 2": MODEL.on(strategy="no_shard", tensor=2),
    "hybrid, EP 2": MODEL.on(instances=2, expert=2),
    "hybrid, TP 2": MODEL.on(instances=2, tensor=2),
}
SMALL = Recipe(layers=1)
COPIES = SMALL.on(strategy="no_shard", tensor=2)
SMALL_ROUNDS = 1 << 14
"""Bytes on their way at a time: the larger chunks travel in parts."""


@pytest.mark.parametrize("name", sampling.drawn("sharing", list(LAYOUTS), share=3))
def test_what_is_loaded_is_the_same_and_every_byte_is_read_once(
    name: str, megatron_ranks: RankPool, tmp_path: Path
) -> None:
    arguments = str(tmp_path / "c"), LAYOUTS[name], SMALL_ROUNDS
    results = megatron_ranks.run(sharing.load_both_ways, *arguments, ranks=WORLD)
    for result in results:
        for mode in ("never, header", "always, header", "always, full", "always, full, nothing kept"):
            assert result[mode][0] == result["saved"], mode
    weights, everything = sharing.bytes_on_disk(tmp_path / "c")
    read = {mode: [result[mode][1] for result in results] for mode in results[0] if "," in mode}
    assert sum(read["never, header"]) > everything, "copies"
    assert sum(read["always, header"]) == everything
    assert sum(read["always, full"]) == everything, "weights are kept until all agree"
    assert sum(read["always, full, nothing kept"]) == everything + weights, "read again, once"
    assert max(read["always, header"]) < everything / 2, "each its part"
    blocks = [result["holds"][0] for result in results]
    for rank, result in enumerate(results):
        _, unwritten, near = result["holds"]
        assert near == [other for other in range(WORLD) if other != rank and blocks[other] & unwritten]


@pytest.mark.parametrize("largest", [LARGEST_RECORD, 1 << 13])
def test_of_another_layout_only_what_is_needed_is_passed_on(
    largest: int, megatron_ranks: RankPool, tmp_path: Path
) -> None:
    """Of whole records, and of parts of them with checksums of their own."""
    saved = str(tmp_path / "c")
    save = sharing.load_both_ways, saved, MODEL.on(strategy="no_shard", tensor=2), SMALL_ROUNDS
    megatron_ranks.run(cases.with_small_records, largest, *save, ranks=2)
    load = sharing.load_of_another_layout, saved, MODEL.on(instances=2), SMALL_ROUNDS
    results: list[dict[str, Any]] = megatron_ranks.run(cases.with_small_records, largest, *load, ranks=WORLD)
    for result in results:
        assert result["always, full"][0] == result["always, header"][0] == result["never, header"][0]
    assert sum(r["always, header"][1] for r in results) < sum(r["never, header"][1] for r in results)


@pytest.fixture(scope="module")
def saved(megatron_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved") / "iter_0000002"
    megatron_ranks.run(cases.train_and_save, str(directory), SMALL, ranks=2)
    return directory


def test_of_more_copies_than_a_circle_holds_each_circle_reads_once(saved: Path, megatron_ranks: RankPool) -> None:
    arguments = str(saved), SMALL.on(strategy="no_shard"), SMALL_ROUNDS, 2
    results = megatron_ranks.run(sharing.load_of_another_layout, *arguments, ranks=WORLD)
    for result in results:
        assert result["always, full"][0] == result["never, header"][0]
    everything = sharing.bytes_on_disk(saved)[1]
    read = {mode: sum(result[mode][1] for result in results) for mode in results[0]}
    assert read["never, header"] == 4 * everything
    assert read["always, header"] == 2 * everything


def same_error(results: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks raised, with nothing changed."""
    assert len({result["text"] for result in results}) == 1, [result["text"] for result in results]
    assert all(result["unchanged"] for result in results)
    return results[0]


@pytest.mark.parametrize("section", ["model.", "optimizer."])
def test_a_flipped_bit_is_named_on_all_ranks(
    section: str, saved: Path, megatron_ranks: RankPool, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(saved, tmp_path / saved.name))
    source = open_checkpoint(directory)
    chunks = source.chunks([key for key in source.metadata.keys if key.startswith(section)])
    damaged = max((chunk for found in chunks.values() for chunk in found), key=lambda chunk: chunk.record.length)
    with (directory / damaged.path.name).open("r+b") as file:
        file.seek(damaged.record.end - damaged.record.length // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    arguments = str(directory), COPIES, "", None
    error = same_error(megatron_ranks.run(sharing.load_with_trouble, *arguments, ranks=WORLD))
    assert error["error"] == "DamagedCheckpointError"
    assert damaged.path.name in error["text"]
    assert damaged.key in error["text"]


@pytest.mark.parametrize(
    ("call", "trouble", "name", "said"),
    [
        ("mbridge_fsdp_ckpt.loading.fill:Staged.read", sharing.broken_disk, "StorageError", "rank 1 on "),
        (
            "mbridge_fsdp_ckpt.loading.exchange:_ReplicaGroup._pack",
            sharing.flipped_on_the_way,
            "ExchangeError",
            "the bytes that rank 1 has read",
        ),
        ("mbridge_fsdp_ckpt.loading.sharing:in_file_order", sharing.one_less, "PlanDisagreementError", "need the same"),
    ],
    ids=["the storage", "on the way", "another plan"],
)
def test_trouble_of_one_rank_is_everybodys_error(
    call: str, trouble: Any, name: str, said: str, saved: Path, megatron_ranks: RankPool
) -> None:
    results = megatron_ranks.run(sharing.load_with_trouble, str(saved), COPIES, call, trouble, ranks=WORLD)
    error = same_error(results)
    assert error["error"] == name
    assert said in error["text"]
    assert error["seconds"] < 25.0, "before the limit"
