# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Asynchronous saves that fail: the same named error on every rank, and the checkpoint before stands."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import pytest

from mbridge_fsdp_ckpt.format.metadata import has_metadata
from testing.outcomes import Died
from testing.ranks import RankPool
from tests.core import beside
from tests.soak.kill import iteration

MARGIN_S = 20.0
"""Of a machine that does other things, too; a writer that is started anew among them."""


def stands(root: Path, number: int) -> bool:
    return has_metadata(iteration(root, number))


def is_running(process_id: int) -> bool:
    """Whether a process is there, and has not ended without anybody asking what it came to."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_writer_that_ends_or_stops_is_named_on_all_ranks(
    how: Literal["killed", "stopped"], victim: int, megatron_ranks: RankPool, tmp_path: Path
) -> None:
    results = megatron_ranks.run(beside.writer_ends, str(tmp_path), victim, how, ranks=2)
    for first, after in results:
        assert {**first, "seconds": 0} == {**results[0][0], "seconds": 0}
        if first["error"] == "RankMissingError":  # those who wait for it may be faster to say so
            assert how == "stopped"
            assert f"of rank {victim}" in first["found"]
        else:
            assert (first["error"], first["rank"]) == ("SaveAbandonedError", victim)
            assert ("no heartbeat" if how == "stopped" else "exit status -9") in first["found"]
        assert first["seconds"] < beside.LIMIT_S + MARGIN_S
        assert after["error"] is None, "the next save has another writer"
    assert [stands(tmp_path, number) for number in (1, 2, 3)] == [True, False, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", "iter_0000003"]


def test_a_trainer_that_dies_is_named_and_its_writer_ends(megatron_ranks: RankPool, tmp_path: Path) -> None:
    survivor, dead = megatron_ranks.run(beside.trainer_dies, str(tmp_path), 1, ranks=2, may_die=[1])
    assert isinstance(dead, Died)
    assert (survivor["error"], survivor["rank"]) == ("SaveAbandonedError", 1)
    assert [stands(tmp_path, number) for number in (1, 2)] == [True, False]
    orphan, begin = int((tmp_path / "orphan").read_text()), time.monotonic()
    while is_running(orphan):
        assert time.monotonic() - begin < beside.LIMIT_S + MARGIN_S
        time.sleep(0.1)


@pytest.mark.parametrize("values", [{"bad": {1, 2}}, {1: "a name that no load would take"}], ids=["a set", "a number"])
def test_what_one_rank_cannot_plan_all_raise_with_the_next_save(
    values: dict[Any, Any], megatron_ranks: RankPool, tmp_path: Path
) -> None:
    results = megatron_ranks.run(beside.planning_fails, str(tmp_path), values, ranks=2)
    errors = [found for found, _ in results]
    assert errors[0] == errors[1]
    assert (errors[0]["error"], errors[0]["rank"]) == ("UnsupportedStateError", 1)
    assert [after["error"] for _, after in results] == [None, None]
    assert [stands(tmp_path, number) for number in (1, 2, 3, 4)] == [True, False, True, True]


def test_a_save_is_skipped_where_one_goes_on_if_the_user_says_so(megatron_ranks: RankPool, tmp_path: Path) -> None:
    assert megatron_ranks.run(beside.skips, str(tmp_path), ranks=2) == [[True, True, None]] * 2
    assert [stands(tmp_path, number) for number in (1, 2, 3, 4)] == [True, True, False, True]


def test_files_and_follow_ups_are_the_callers(megatron_ranks: RankPool, tmp_path: Path) -> None:
    first, second = megatron_ranks.run(beside.follows_up, str(tmp_path), ranks=2)
    assert first[0] == ["save 1", "after"]
    assert second[0] == []
    assert (iteration(tmp_path, 1) / "extra.txt").read_text() == "more"
    for _, ended, failed in (first, second):
        assert ended is None
        assert "the tracker is read-only" in failed["found"]
        assert "in its place" in failed["remedy"]
    assert stands(tmp_path, 2)


def test_a_load_waits_for_the_snapshot(megatron_ranks: RankPool, tmp_path: Path) -> None:
    assert megatron_ranks.run(beside.loads_meanwhile, str(tmp_path), ranks=2) == [True, True]
