# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""One life of an asynchronous save: it ends, by one name on all ranks, whatever a thread or process meets."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from mbridge_fsdp_ckpt.format.metadata import has_metadata
from mbridge_fsdp_ckpt.io.progress import Unwatched
from mbridge_fsdp_ckpt.tools.verify import verify
from testing.ranks import RankPool
from tests.core import beside, forked, lives
from tests.core.test_beside_faults import MARGIN_S, is_running
from tests.soak.kill import iteration


def alike(results: list[dict[str, lives.Ended]]) -> dict[str, lives.Ended]:
    """What all ranks have seen alike, but for how long it took."""
    timeless = [{what: {**ended, "seconds": 0} for what, ended in result.items()} for result in results]
    assert timeless == timeless[:1] * len(results)
    assert all(
        ended.get("seconds", 0) < 2 * beside.LIMIT_S + MARGIN_S for result in results for ended in result.values()
    )
    return timeless[0]


def test_callbacks_and_loggers_of_the_users_end_no_more_than_their_save(
    megatron_ranks: RankPool, tmp_path: Path
) -> None:
    first, second = megatron_ranks.run(lives.callbacks, str(tmp_path), ranks=2)
    assert first["late"] == second["late"] == ["SaveAbandonedError", None, 2]
    assert (iteration(tmp_path, 2) / "extra.txt").read_text() == "whole"
    assert verify(iteration(tmp_path, 2), header=False, workers=1, progress=Unwatched()).damage == []
    for one, other in zip(first["exits"], second["exits"], strict=True):
        ended = alike([{"": one}, {"": other}])[""]
        assert (ended["error"], ended["rank"]) == ("RankFailedError", 0)
        assert "SystemExit: 3" in ended["found"]
    assert [result[name]["error"] for result in (first, second) for name in ("logs", "numbers")] == [None] * 4


def test_a_thread_that_ends_ends_its_save_by_name(megatron_ranks: RankPool, tmp_path: Path) -> None:
    found = alike(megatron_ranks.run(lives.threads, str(tmp_path), ranks=2))
    said = {
        "none to be had": "can't start new thread",
        "copying": "SystemExit: 4",
        "hearing": "SystemExit: 5",
        "telling": "no memory to send with",
        "serving": "SystemExit: 6",
    }
    for what, words in said.items():
        assert words in found[what].get("found", "no error"), what
        assert found[what]["rank"] == (0 if what in ("hearing", "serving") else 1)


def test_nothing_is_left_of_saves_that_have_ended(megatron_ranks: RankPool, tmp_path: Path) -> None:
    for found in megatron_ranks.run(lives.leaves_nothing, str(tmp_path), ranks=2):
        assert found["failed"] == "UnsupportedStateError"
        assert (found["was alive"], found["state"], found["callbacks"]) == (True, True, True)
        assert found["counted"] == found["counted"][:1] * 4
        assert found["counted"][0]["own threads"] == 0


def test_silence_is_not_time_in_which_nobody_listened(megatron_ranks: RankPool, tmp_path: Path) -> None:
    found = alike(megatron_ranks.run(lives.stopped, str(tmp_path), ranks=2))
    assert {what: ended["error"] for what, ended in found.items()} == dict.fromkeys(found)
    [ended] = megatron_ranks.run(lives.suspended, str(tmp_path / "suspended"), ranks=1)
    assert ended["error"] is None


def test_checkpoint_processes_go_by_their_channel_alone(megatron_ranks: RankPool, tmp_path: Path) -> None:
    assert megatron_ranks.run(lives.signals, str(tmp_path), ranks=2) == [[None, None, True]] * 2
    pids = tmp_path / "pids"
    megatron_ranks.run(lives.dies_at_the_start, str(tmp_path), str(pids), ranks=1, may_die=[0])
    writer, holder = map(int, pids.read_text().split())
    try:
        deadline = time.monotonic() + beside.LIMIT_S + MARGIN_S
        while is_running(writer):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        os.kill(holder, signal.SIGKILL)


def test_a_checkpoint_process_runs_the_package_that_its_trainer_does(megatron_ranks: RankPool, tmp_path: Path) -> None:
    found = megatron_ranks.run(lives.paths, str(tmp_path), str(tmp_path / "here"), ranks=2)
    assert [result.pop("ran") for result in found] == [False, False]
    ended = alike(found)
    assert [ended[what]["error"] for what in ("working directory", "environment", "after")] == [None] * 3
    other = ended["another one"]
    assert (other["error"], other["rank"]) == ("ConfigurationError", 1)
    assert "9." in other["found"]
    assert str(tmp_path / "other-1") in other["found"]


def test_what_ranks_ask_at_a_step_has_one_answer(megatron_ranks: RankPool, tmp_path: Path) -> None:
    assert megatron_ranks.run(lives.in_unison, str(tmp_path), ranks=2) == [[False, False, False, True]] * 2


def test_ranks_begin_saves_in_the_order_of_their_calls_and_leave_no_keys(
    megatron_ranks: RankPool, tmp_path: Path
) -> None:
    for skipped, error, *keys in megatron_ranks.run(lives.in_order, str(tmp_path), ranks=2):
        assert (skipped, error) == (True, None)
        assert keys[2:] == keys[2:3] * 4


def test_a_save_whose_wait_was_interrupted_still_comes_before_the_next(
    megatron_ranks: RankPool, tmp_path: Path
) -> None:
    assert megatron_ranks.run(lives.interrupted, str(tmp_path), ranks=2) == [["interrupted", True, None, None]] * 2
    assert all(has_metadata(iteration(tmp_path, number)) for number in (1, 2, 3))


def test_an_old_error_takes_no_new_saves_place(megatron_ranks: RankPool, tmp_path: Path) -> None:
    results = megatron_ranks.run(lives.old_errors, str(tmp_path), ranks=2)
    assert results[0] == results[1]
    first, then, third, none, newer, last = results[0]
    assert [len(first), len(then), len(third), len(none), len(newer), len(last)] == [1, 0, 1, 0, 2, 0]
    assert "rank_values.one" in first[0]
    assert "rank_values.three" in third[0]
    assert "rank_values.seven" in newer[0]
    assert "rank_values.six" in newer[1]
    assert [has_metadata(iteration(tmp_path, number)) for number in range(1, 8)] == [
        False, True, False, True, True, False, False,
    ]  # fmt: skip


def test_forked_children_have_no_part_in_it(megatron_ranks: RankPool, tmp_path: Path) -> None:
    [loaded] = megatron_ranks.run(forked.loads, str(tmp_path / "loads"), ranks=1)
    assert (loaded.pop("error"), loaded.pop("next")) == (None, None)
    assert loaded == {what: [0, 1, 2, 3] for what in loaded}
    [found] = megatron_ranks.run(forked.forks, str(tmp_path / "forks"), ranks=1)
    assert found == {
        "codes": {"asks": 0, "leaves": 0, "outlives": 0},
        "said": {"asks": " ".join(["ConfigurationError"] * 5), "leaves": "left", "outlives": ""},
        "errors": [None, None],
        "same": True,
    }
