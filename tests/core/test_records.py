# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Blocks of which each is several records, of several hashed blocks each, as those of large models are: any layout,
stock's reader, the estimate."""

from __future__ import annotations

from pathlib import Path

import pytest

from mbridge_fsdp_ckpt.format.reader import SafeSource
from mbridge_fsdp_ckpt.io.store import as_path
from testing.ranks import RankPool
from tests.core import cases, estimated, oracle
from tests.core.test_layouts import LAYOUTS, QWEN
from tests.soak import sampling

LARGEST = 200
"""Bytes of a record: a row or two of most matrices in fp32, and less than a row of some."""


@pytest.mark.parametrize("saved_in", sampling.drawn("cut blocks", ["2 ranks", "4 ranks, TP 2"], share=2))
def test_a_checkpoint_of_cut_blocks_loads_in_any_layout(
    saved_in: str, megatron_ranks: RankPool, tmp_path: Path
) -> None:
    ranks, layout = LAYOUTS[saved_in]
    recipe, first = QWEN.on(**layout), tmp_path / "first"
    save = (LARGEST, cases.train_and_save, str(first), recipe)
    saved = megatron_ranks.run(cases.with_small_records, *save, ranks=ranks)[0]
    source = SafeSource(as_path(first))
    assert max(map(len, source.chunks(source.metadata.keys).values())) > 4 * ranks
    assert {key: value for key, value in oracle.on_disk(first).items() if not key.endswith(".step")} == saved["live"]
    again = (LARGEST, cases.load_counting, str(first), recipe)
    found = megatron_ranks.run(cases.with_small_records, *again, ranks=ranks)
    assert not any(rank["rows"] for rank in found), "the same layout reads no rows of the groups' index files"
    assert found[0]["live"] == saved["live"]
    names = sampling.drawn(f"layouts of cut blocks after {saved_in}", list(LAYOUTS), share=4)
    for number, name in enumerate(names):
        other_ranks, other = LAYOUTS[name]
        load = (LARGEST, cases.load_and_save, str(first), str(tmp_path / f"{number}"), QWEN.on(**other))
        loaded = megatron_ranks.run(cases.with_small_records, *load, ranks=other_ranks)[0]
        assert loaded["live"] == saved["live"], name
        assert oracle.on_disk(tmp_path / f"{number}") == oracle.on_disk(first), name


def test_an_estimate_counts_records(megatron_ranks: RankPool, tmp_path: Path) -> None:
    recipe, directory = QWEN.on(tensor=2), tmp_path / "c"
    save = (LARGEST, cases.train_and_save, str(directory), recipe)
    megatron_ranks.run(cases.with_small_records, *save, ranks=4)
    (found,) = megatron_ranks.run(estimated.with_small_records, LARGEST, estimated.estimate, recipe, 4, ranks=1)
    real = estimated.written(directory)
    assert {rank: work.bytes for rank, work in found["planned"].items()} == real["payload"]
    assert {rank: estimated.counts(work) for rank, work in found["planned"].items()} == real["counted"]
    assert found["counted"] == found["planned"]
    assert all(work.chunks > 2 * work.blocks for work in found["planned"].values())
    assert 0.7 < found["index"] / sum(path.stat().st_size for path in directory.glob("*.index")) < 1.4


def test_an_estimate_knows_what_another_layout_reads(megatron_ranks: RankPool, tmp_path: Path) -> None:
    saved, loading = QWEN.on(tensor=2), QWEN.on(expert=2)
    save = (LARGEST, cases.train_and_save, str(tmp_path / "c"), saved)
    megatron_ranks.run(cases.with_small_records, *save, ranks=2)
    jobs = saved, 2, loading, 4
    ((ratio, held),) = megatron_ranks.run(estimated.with_small_records, LARGEST, estimated.elsewhere, *jobs, ranks=1)
    read = cases.with_small_records(LARGEST, estimated.really_read, tmp_path / "c", held)
    assert ratio == pytest.approx(read, rel=1e-12)
    ((uncut, _),) = megatron_ranks.run(estimated.elsewhere, *jobs, ranks=1)
    assert ratio < uncut, "small records are what a load in a finer layout reads less of"
