# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Saves and loads tell what they took: what they return, one line of rank 0's log, and, of a save, the checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import pytest

from mbridge_fsdp_ckpt.format.manifest import read_manifest
from mbridge_fsdp_ckpt.tools.timeline.lanes import timeline
from testing.models import Recipe
from testing.ranks import RankPool
from tests.core import timed
from tests.unit.test_phases import taken_apart

SMALL = Recipe(layers=1)
SLOW_RANK, SECONDS = 1, 0.75


@pytest.mark.parametrize("shared", ["never", "always"])
def test_a_slow_rank_is_marked_and_all_say_what_they_did(shared: str, megatron_ranks: RankPool, tmp_path: Path) -> None:
    target, before = tmp_path / "iter_0000001", time.time()
    recipe = SMALL if shared == "never" else SMALL.on(strategy="no_shard")
    results = megatron_ranks.run(
        timed.save_and_load, str(target), recipe, SLOW_RANK if shared == "never" else 0, SECONDS, shared, ranks=4
    )
    slow = SLOW_RANK if shared == "never" else 0
    sizes = [path.stat().st_size if path.exists() else 0 for path in (target / f"__{n}_0.distcp" for n in range(4))]

    assert [result["saved"]["bytes"] for result in results] == sizes
    assert {result["saved"]["bytes_of_all"] for result in results} == {sum(sizes)}
    read = [result["loaded"]["bytes"] for result in results]
    assert {result["loaded"]["bytes_of_all"] for result in results} == {sum(read)}
    if shared == "always":
        assert sum(read) == sum(sizes), "each byte is read once"
        assert 0 < min(read) < sum(sizes)
    else:
        assert sum(read) >= sum(sizes)
    for result in results:
        for what in ("saved", "loaded"):
            assert sum(result[what]["seconds"].values()) <= result[what]["duration"]
    assert results[slow]["saved"]["seconds"]["flush"] >= SECONDS
    others = [result["saved"]["seconds"] for n, result in enumerate(results) if n != slow]
    assert all(of["commit"] >= SECONDS / 2 for of in others), "they wait for it"

    (save, saved), (load, loaded) = map(taken_apart, results[0]["lines"])
    assert (save, load) == ("save", "load")
    assert [result["lines"] for result in results[1:]] == [[]] * 3
    assert (saved["directory"], saved["bytes"], saved["rank_bytes"]) == (str(target), str(sum(sizes)), str(sizes[0]))
    assert list(saved)[5:] == ["plan", "agree", "write", "flush", "compare", "index", "commit"]
    assert set(loaded) >= {"open", "agree", "read", "exchange", "fill", "refresh"}

    found = timeline(target)
    assert [lane.rank for lane in found.lanes] == [0, 1, 2, 3]
    assert [(one.rank, one.phase) for one in found.stragglers] == [(slow, "flush")]
    assert all(before <= (lane.begun or 0) <= result["now"] for lane, result in zip(found.lanes, results, strict=True))
    assert found.commit is not None
    assert found.commit > SECONDS
    assert before + SECONDS < (read_manifest(target).time or 0) <= results[0]["now"]


@pytest.mark.parametrize("share", [False, True], ids=["", "reads shared"])
def test_rank_0_shows_a_bar_on_a_terminal(share: bool, megatron_ranks: RankPool, tmp_path: Path) -> None:
    recipe = SMALL.on(strategy="no_shard") if share else SMALL
    seen = megatron_ranks.run(timed.shown, str(tmp_path / "c"), recipe, "terminal", True, 0.0, share, ranks=2)
    assert all(word in seen[0] for word in ("saving", "reading", "filling"))
    assert "100%" in seen[0] or "kB" in seen[0]
    assert seen[0].endswith("\x1b[2K"), "it goes when it is done"
    assert seen[1] == ""


@pytest.mark.parametrize(
    ("kind", "wanted", "patience"),
    [("pipe", True, 0.0), ("terminal", False, 0.0), ("terminal", True, 60.0)],
    ids=["a pipe", "not wanted", "short"],
)
def test_nothing_is_shown(
    kind: Literal["terminal", "pipe"], wanted: bool, patience: float, megatron_ranks: RankPool, tmp_path: Path
) -> None:
    seen = megatron_ranks.run(timed.shown, str(tmp_path / "c"), SMALL, kind, wanted, patience, False, ranks=2)
    assert seen == ["", ""]
