# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Ranks that hold the same write equal parts of it: nobody writes last and most, whatever is copied."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mbridge_fsdp_ckpt.io.store import as_path
from mbridge_fsdp_ckpt.tools.survey import survey, visit_chunks
from testing.models import Recipe
from testing.ranks import RankPool
from tests.core import cases, oracle
from tests.core.test_estimate import check
from tests.soak import sampling

RANKS = 4
MODEL = Recipe(layers=3, hidden=96, ffn=256, experts=4, gated_delta_net=True)

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 4": {"tensor": 4},
    "TP 2": {"tensor": 2},
    "hybrid": {"instances": 2},
    "hybrid, TP 2, EP 2": {"instances": 2, "tensor": 2, "expert": 2},
    "hybrid, outer sharded": {"instances": 2, "outer": "optim"},
    "no_shard": {"strategy": "no_shard"},
    "no_shard, offload": {"strategy": "no_shard", "offload": 0.5},
    "no_shard, EP 2": {"strategy": "no_shard", "expert": 2},
}


@pytest.mark.parametrize("name", sampling.drawn("even bytes", list(LAYOUTS), share=2))
def test_bytes_are_even(name: str, megatron_ranks: RankPool, tmp_path: Path) -> None:
    first = tmp_path / "first"
    check(MODEL.on(**LAYOUTS[name]), RANKS, megatron_ranks, first)
    found, chunks = survey(as_path(first)), Counter[str]()
    visit_chunks(as_path(first), found, lambda key, rank, box: chunks.update([key]))
    assert sorted(found.ranks) == list(range(RANKS))
    assert found.balance.ratio <= 1.05, found.ranks
    if LAYOUTS[name].get("strategy") == "no_shard":
        assert 1 <= sum(count > 1 for count in chunks.values()) <= 4 * RANKS, "what is cut, is cut between two writers"


def test_what_is_cut_between_writers_is_loaded_elsewhere(megatron_ranks: RankPool, tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    layout = MODEL.on(**LAYOUTS["hybrid, TP 2, EP 2"])
    (saved, *_) = megatron_ranks.run(cases.train_and_save, str(first), layout, ranks=RANKS)
    elsewhere = MODEL.on(**LAYOUTS["no_shard"])
    (loaded, *_) = megatron_ranks.run(cases.load_and_save, str(first), str(again), elsewhere, ranks=RANKS)
    assert loaded["live"] == saved["live"]
    assert oracle.on_disk(again) == oracle.on_disk(first)
