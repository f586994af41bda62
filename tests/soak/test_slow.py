# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Storage that is slow: a call that takes 2.5 times the time limit, anywhere on any rank, fails no save and no load."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from testing.modules import MEGATRON_MODULES
from testing.ranks import RankPool
from testing.templates import Templates
from tests.patience import patient_ranks
from tests.soak import sampling, slow
from tests.soak.slow import Trial

RANKS = 2
SHARE = 60  # one in so many cases runs by default: each waits for a slow call
AT_ONCE = 8  # trials of one world


@pytest.fixture(scope="module")
def pool(templates: Templates) -> Iterator[RankPool]:
    yield from patient_ranks(templates, ("megatron.core",), MEGATRON_MODULES, RANKS)


def test_a_slow_call_fails_nobody(pool: RankPool, tmp_path: Path) -> None:
    facts = {"time limit, s": slow.LIMIT_S, "a slow call, s": slow.SLOW_S}
    run_all("slow", slow.run, slow.SCENARIOS, set(slow.CALLS), facts, pool, tmp_path)


def test_a_slow_call_of_a_writer_or_its_trainer_fails_nobody(pool: RankPool, tmp_path: Path) -> None:
    facts = {"time limit, s": slow.LIMIT_BESIDE_S, "a slow call, s": slow.SLOW_BESIDE_S}
    kinds = {slow.COPY, *slow.CALLS}
    run_all("slow_beside", slow.run_beside, slow.BESIDE, kinds, facts, pool, tmp_path)


def run_all(
    name: str,
    run: Callable[..., Any],
    scenarios: Sequence[str],
    kinds: set[str],
    facts: Mapping[str, float],
    pool: RankPool,
    tmp_path: Path,
) -> None:
    """The trials of some scenarios, in which calls of these kinds are made."""
    begin, outcomes = time.monotonic(), []
    trials = sampling.drawn(name, matrix(pool, run, scenarios, kinds, tmp_path / "counted"), SHARE)
    for first in range(0, len(trials), AT_ONCE):
        some = trials[first : first + AT_ONCE]
        limit = 60.0 + len(some) * (10.0 + 2 * facts["a slow call, s"])
        by_rank = pool.run(run, str(tmp_path / str(first)), some, time_limit=limit)
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
    print(f"{name}: {found}; {sampling.how_to_repeat()}")
    sampling.record(name, sampling.Result(time.monotonic() - begin, found, facts))


def matrix(
    pool: RankPool, run: Callable[..., Any], scenarios: Sequence[str], kinds: set[str], place: Path
) -> list[Trial]:
    """In every scenario the first, a middle and the last call of each kind, on each rank that makes it."""
    counting = [Trial(scenario, "none", 0, 0) for scenario in scenarios]
    found, made = [], set()
    for rank, seen in enumerate(pool.run(run, str(place), counting)):
        for scenario, counted in zip(scenarios, seen, strict=True):
            assert counted["error"] is None, counted
            for kind, count in counted["calls"].items():
                made.add(kind)
                found += [Trial(scenario, kind, rank, number) for number in sorted({1, (count + 1) // 2, count})]
    assert made == kinds, f"some calls are not seen: {kinds ^ made}"
    return found
