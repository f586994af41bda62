"""Storage that is slow: a call that takes 2.5 times the time limit, anywhere on any rank, fails no save and no load."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mbridge_fsdp_ckpt.testing.modules import MEGATRON_MODULES
from mbridge_fsdp_ckpt.testing.ranks import RankPool
from tests.patience import patient_ranks
from tests.soak import sampling, slow
from tests.soak.slow import Trial

RANKS = 2
SHARE = 40  # one in so many cases runs by default: each waits for a slow call
AT_ONCE = 8  # trials of one world


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    yield from patient_ranks(("megatron.core",), MEGATRON_MODULES, RANKS)


def test_a_slow_call_fails_nobody(pool: RankPool, tmp_path: Path) -> None:
    begin, outcomes = time.monotonic(), []
    trials = sampling.drawn("slow", matrix(pool, tmp_path / "counted"), SHARE)
    for first in range(0, len(trials), AT_ONCE):
        some = trials[first : first + AT_ONCE]
        limit = 60.0 + len(some) * (10.0 + 2 * slow.SLOW_S)
        by_rank = pool.run(slow.run, str(tmp_path / str(first)), some, time_limit=limit)
        for trial, *seen in zip(some, *by_rank, strict=True):
            context = f"{trial}; {seen}; {sampling.how_to_repeat()}"
            assert [rank["error"] for rank in seen] == [None] * RANKS, context
            assert all(rank["right"] for rank in seen), context
            made = seen[trial.rank]["calls"].get(trial.call, 0) >= trial.number
            assert made or trial.scenario == slow.SHARED, context
            assert seen[trial.rank]["was_slow"] == made, context
            assert seen[0]["left"] == ["iter_0000001"], context
            outcome = "as if nothing were slow" if made else "the other rank had read it"
            outcomes.append((f"{trial.scenario}, {trial.call}", outcome))
    found = sampling.tally(outcomes)
    print(f"slow: {found}; {sampling.how_to_repeat()}")
    facts = {"time limit, s": slow.LIMIT_S, "a slow call, s": slow.SLOW_S}
    sampling.record("slow", sampling.Result(time.monotonic() - begin, found, facts))


def matrix(pool: RankPool, place: Path) -> list[Trial]:
    """In every scenario the first, a middle and the last call of each kind, on each rank that makes it."""
    counting = [Trial(scenario, "none", 0, 0) for scenario in slow.SCENARIOS]
    found, kinds = [], set()
    for rank, seen in enumerate(pool.run(slow.run, str(place), counting)):
        for scenario, counted in zip(slow.SCENARIOS, seen, strict=True):
            assert counted["error"] is None, counted
            for kind, count in counted["calls"].items():
                kinds.add(kind)
                found += [Trial(scenario, kind, rank, number) for number in sorted({1, (count + 1) // 2, count})]
    assert kinds == set(slow.CALLS), "some calls are not seen"
    return found
