# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A rank is killed during a save, at a random moment or at a step: what resumes is complete, the older or the newer."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from testing.modules import MEGATRON_MODULES, installed
from testing.ranks import Died, RankFailed, RankPool, RanksHung
from testing.templates import Templates
from tests.soak import kill, sampling
from tests.soak.kill import NEW, OLD, Death

RANKS = 2
MOMENTS = 300
ATTEMPTS = 3
SURVIVORS_S = 0.3  # how long those who live go on before the job's end takes them, too


@dataclass(frozen=True, slots=True)
class Trial:
    """One killed save.

    Args:
        overwrites: Into the older checkpoint's own directory, not a fresh one.
        victim: Which rank dies first.
        moment: When, in units of a whole save's duration; None where `death` says.
        death: At which step.
        exchanges: Whether the file system can exchange two directories.
    """

    overwrites: bool
    victim: int
    moment: float | None = None
    death: Death | None = None
    exchanges: bool = True


@dataclass(frozen=True, slots=True)
class Prepared:
    """The older checkpoint, what both states hold, and how long a save takes."""

    root: Path
    states: dict[str, Any]
    save_s: float


@pytest.fixture(scope="module")
def pool(templates: Templates) -> Iterator[RankPool]:
    with RankPool(RANKS, preload=installed(MEGATRON_MODULES), templates=templates) as pool:
        yield pool


@pytest.fixture(scope="module")
def prepared(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    root = tmp_path_factory.mktemp("older")
    old = pool.run(kill.save_state, str(root), OLD, OLD)[0]
    new = pool.run(kill.save_state, str(tmp_path_factory.mktemp("newer")), NEW, NEW)[0]
    assert old != new
    heartbeats = tmp_path_factory.mktemp("heartbeats")
    pool.run(kill.save_and_die, str(tmp_path_factory.mktemp("timed")), NEW, str(heartbeats), None, True)
    times = {kind: [path.stat().st_mtime for path in heartbeats.glob(f"{kind}-*")] for kind in ("began", "ended")}
    return Prepared(root, {"old": old, "new": new}, max(times["ended"]) - min(times["began"]))


def moments(count: int, draw: random.Random) -> list[Trial]:
    return [Trial(draw.random() < 0.5, draw.randrange(RANKS), moment=draw.uniform(0.0, 1.1)) for _ in range(count)]


def steps() -> list[Trial]:
    """Every call of every step, before and after it, on every rank that takes it, overwriting and fresh."""
    found = []
    for step in kill.STEPS:
        calls = itertools.product(range(1, step.times + 1), (False, True), step.ranks, (True, False))
        for time_, after, rank, overwrites in calls:
            if overwrites or step.fresh:
                death = Death(step.name, time_, after, rank)
                found.append(Trial(overwrites, rank, death=death, exchanges=step.exchanges))
    return found


def test_what_resumes_is_complete_whenever_a_rank_is_killed(pool: RankPool, prepared: Prepared, tmp_path: Path) -> None:
    draw = sampling.rng("kill moments")
    count = MOMENTS if sampling.FULL else MOMENTS // 30
    run_all("kill_moments", moments(count, draw), pool, prepared, tmp_path)


def test_what_resumes_is_complete_at_whichever_step_a_rank_is_killed(
    pool: RankPool, prepared: Prepared, tmp_path: Path
) -> None:
    run_all("kill_steps", sampling.drawn("kill steps", steps()), pool, prepared, tmp_path)


def run_all(name: str, trials: list[Trial], pool: RankPool, prepared: Prepared, tmp_path: Path) -> None:
    begin, outcomes = time.monotonic(), []
    for number, trial in enumerate(trials):
        root = tmp_path / str(number)
        outcomes.append((_kind(trial), run_one(trial, pool, prepared, root)))
        shutil.rmtree(root)
    found = sampling.tally(outcomes)
    print(f"{name}: {found}; {sampling.how_to_repeat()}")
    sampling.record(name, sampling.Result(time.monotonic() - begin, found, {"seconds a save": prepared.save_s}))


def _kind(trial: Trial) -> str:
    place = "overwriting" if trial.overwrites else "fresh"
    if trial.death is None:
        return f"{place}, rank {trial.victim}"
    number = f" {trial.death.time}" if trial.death.time > 1 else ""
    return f"{place}, {'after' if trial.death.after else 'before'} {trial.death.step}{number}, rank {trial.victim}"


def run_one(trial: Trial, pool: RankPool, prepared: Prepared, root: Path) -> str:
    """Returns which state the resume found, and what the ranks saw of the save."""
    results = None
    for _ in range(ATTEMPTS):
        results = results or save_and_kill(trial, pool, prepared, root)
    assert results is not None, f"gloo failed in the training before the save, {ATTEMPTS} times: {trial}"
    context = f"{trial}; {sampling.how_to_repeat()}; left: {sorted(path.name for path in root.iterdir())}"
    number = OLD if trial.overwrites else NEW
    resumed = pool.run(kill.resume, str(root), number)[0]
    state = next((name for name, live in prepared.states.items() if live == resumed["live"]), None)
    assert state is not None, f"what was loaded is neither state: {context}"
    if not trial.overwrites:
        assert resumed["from"] == kill.iteration(root, OLD if state == "old" else NEW).name, context
    own, others = resumed["left"]
    assert [name for name in own if kill.iteration(root, number).name in name] == [], f"the same save: {context}"
    assert others == [], f"the next save left {others}: {context}"
    killed = isinstance(results[trial.victim], Died)
    assert killed or trial.death is None, f"the step was never taken: {context}"
    return f"{state} state, {'killed' if killed else 'through before its moment'}"


def save_and_kill(trial: Trial, pool: RankPool, prepared: Prepared, root: Path) -> list[Any] | None:
    """What the ranks say of the save; None where gloo failed before it began, as it does now and then."""
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(prepared.root, root)
    heartbeats = root.parent / f"{root.name}.heartbeats"
    shutil.rmtree(heartbeats, ignore_errors=True)
    heartbeats.mkdir()
    number, over = OLD if trial.overwrites else NEW, threading.Event()
    pool.start()
    killer = threading.Thread(target=_kill, args=(trial, pool.processes, heartbeats, prepared.save_s, over))
    killer.start()
    arguments = str(root), number, str(heartbeats), trial.death, trial.exchanges
    try:
        results = pool.run(kill.save_and_die, *arguments, may_die=range(RANKS))
    except (RankFailed, RanksHung):
        if _began(heartbeats):
            raise
        return None
    finally:
        over.set()
        killer.join()
    return results if _began(heartbeats) else None


def _began(heartbeats: Path) -> bool:
    return len(list(heartbeats.glob("began-*"))) == RANKS


def _kill(trial: Trial, processes: dict[int, int], heartbeats: Path, save_s: float, over: threading.Event) -> None:
    """Kill the victim at its moment, then, as a launcher does, everybody else."""
    victim = processes[trial.victim]
    _wait(lambda: _began(heartbeats) or over.is_set())
    if trial.moment is not None and not over.is_set():
        time.sleep(trial.moment * save_s)
        _end(victim)
    _wait(lambda: not _lives(victim) or (heartbeats / f"ended-{trial.victim}").exists() or over.is_set())
    if not over.is_set():
        time.sleep(SURVIVORS_S)
        for process in processes.values():
            _end(process)


def _wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not until() and time.monotonic() < deadline:
        time.sleep(0.0005)


def _end(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _lives(process: int) -> bool:
    try:
        return not Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0].startswith("Z")
    except (FileNotFoundError, ProcessLookupError):
        return False
