# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A writer, its trainer or both are killed in an asynchronous save: what resumes is the older or the newer."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from testing.modules import MEGATRON_MODULES, installed
from testing.ranks import Died, RankPool
from testing.templates import Templates
from tests.soak import kill, kill_beside, sampling
from tests.soak.kill import NEW, OLD
from tests.soak.kill_beside import Who

RANKS = 2
SHARE = 60  # of the cases one in so many runs by default: each starts writers
LIMIT_S = 90.0
RAISED = {"SaveAbandonedError", "RankMissingError", "saved"}


@dataclass(frozen=True, slots=True)
class Trial:
    """One save in which somebody dies.

    Args:
        who: Of the victim's two processes.
        step: When: before this step of the writer.
        time: At which of its calls.
        rank: The victim.
        overwrites: Whether the save is into the older checkpoint's own directory, not a fresh one.
    """

    who: Who
    step: str
    time: int
    rank: int
    overwrites: bool


def trials() -> list[Trial]:
    """Every step of a writer on every rank that takes it, for each that can die."""
    found: list[Trial] = []
    for step in (*kill_beside.WRITERS_STEPS, *kill_beside.OWN_STEPS):
        calls = step.times if step.name != "pathlib:Path.replace" else 1  # the tracker is the trainer's
        for call in range(1, calls + 1):
            for rank in step.ranks:
                for who in kill_beside.WHO:
                    overwrites = not step.fresh or len(found) % 2 == 0
                    found.append(Trial(who, step.name, call, rank, overwrites))
    return found


@pytest.fixture(scope="module")
def pool(templates: Templates) -> Iterator[RankPool]:
    with RankPool(RANKS, preload=installed(MEGATRON_MODULES), templates=templates) as pool:
        yield pool


@pytest.fixture(scope="module")
def older(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The older checkpoint, and what both states hold."""
    root = tmp_path_factory.mktemp("older")
    old = pool.run(kill.save_state, str(root), OLD, OLD)[0]
    new = pool.run(kill.save_state, str(tmp_path_factory.mktemp("newer")), NEW, NEW)[0]
    assert old != new
    return root, {"old": old, "new": new}


def test_what_resumes_is_complete_whoever_dies(
    pool: RankPool, older: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    begin, outcomes = time.monotonic(), []
    for number, trial in enumerate(sampling.drawn("kill beside", trials(), SHARE)):
        root = tmp_path / str(number)
        outcomes.append((f"{trial.who}, before {trial.step}", run_one(trial, pool, *older, root)))
        shutil.rmtree(root)
    found = sampling.tally(outcomes)
    print(f"kill_beside: {found}; {sampling.how_to_repeat()}")
    sampling.record("kill_beside", sampling.Result(time.monotonic() - begin, found, {}))


def test_a_trainer_that_has_ended_before_its_writer_asks_it_something_is_named(
    pool: RankPool, older: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Nobody listens by then: that is no fault of the storage."""
    trial = Trial("trainer", "saving.background.checkpoint_main:Writer._ask", 1, rank=0, overwrites=False)
    assert run_one(trial, pool, *older, tmp_path / "root") == "old state, SaveAbandonedError"


def run_one(trial: Trial, pool: RankPool, before: Path, states: dict[str, Any], root: Path) -> str:
    """Returns which state the resume found, and what the survivors saw."""
    shutil.copytree(before, root)
    heartbeats = root.parent / f"{root.name}.heartbeats"
    heartbeats.mkdir()
    number = OLD if trial.overwrites else NEW
    context = f"{trial}; {sampling.how_to_repeat()}"
    where = trial.step, trial.time, trial.rank
    results = pool.run(
        kill_beside.save_and_die,
        *(str(root), number, str(heartbeats), trial.who, *where),
        may_die=[trial.rank],
        time_limit=LIMIT_S,
    )
    assert (heartbeats / "died").exists(), f"the step was never taken: {context}"
    assert isinstance(results[trial.rank], Died) == (trial.who != "writer"), context
    seen = {result for result in results if not isinstance(result, Died)}
    assert len(seen) == 1, f"ranks saw different things, {seen}: {context}"
    assert seen <= RAISED, context
    resumed = pool.run(kill.resume, str(root), number)[0]
    state = next((name for name, live in states.items() if live == resumed["live"]), None)
    assert state is not None, f"what was loaded is neither state: {context}"
    if seen == {"saved"}:
        assert state == "new", f"it was said to be saved: {context}"
    assert resumed["left"][1] == [], f"the next save left {resumed['left'][1]}: {context}"
    return f"{state} state, {seen.pop()}"
