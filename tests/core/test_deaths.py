# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A rank that raises, dies or stalls anywhere in a save or load is one named error on all others, in time."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testing.modules import MEGATRON_MODULES
from testing.ranks import Died, RankPool
from testing.templates import Templates
from tests.core import cases, deaths
from tests.patience import patient_ranks
from tests.soak import sampling

WORLD = 4
HOST = socket.gethostname()
SAVE_STEPS = {
    "planning": "saving.snapshot:plan_save",
    "writing": "saving.writer:write",
    "commit": "format.payload:PayloadWriter.close",
}
LOAD_STEPS = {
    "reading": "loading.opened:open_and_match",
    "verifying": "loading.opened:check_coverage",
    "staging": "loading.fill:_Filling.finish",
    "filling": "loading.state:install",
}
SHARED_STEPS = {
    "connecting": "loading.exchange:_ReplicaGroup.join",
    "comparing": "loading.exchange:_ReplicaGroup.compare",
    "reading for others": "loading.fill:Staged.read",
    "passing on": "loading.exchange:_ReplicaGroup._take",
    "filling": "loading.fill:Staged.take",
}
ENDINGS = ("raises", "dies", "stalls")


def sampled(name: str, steps: Iterable[str], share: int = 4) -> list[tuple[str, int, str]]:
    """A fresh part of every step with every victim and every ending; all of them in `make test-all`."""
    return sampling.drawn(name, list(itertools.product(steps, (0, 1), ENDINGS)), share)


@pytest.fixture(scope="module")
def pool(templates: Templates) -> Iterator[RankPool]:
    """Ranks that may die."""
    yield from patient_ranks(templates, ("megatron.core",), MEGATRON_MODULES)


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved") / "iter_0000002"
    pool.run(cases.train_and_save, str(directory), deaths.RECIPE, ranks=WORLD)
    return directory


def survivors(results: list[Any], victim: int, ending: str) -> list[dict[str, Any]]:
    """What the others saw: the same, and in time; a rank that stalls sees it when it comes back."""
    others = [result for rank, result in enumerate(results) if rank != victim]
    assert not any(isinstance(result, Died) for result in others)
    assert isinstance(results[victim], Died) == (ending == "dies")
    for other in others:
        assert other["seconds"] < 2 * (deaths.LIMIT_S + deaths.GRACE_S) + 10.0
    alive = [result for result in results if not isinstance(result, Died)]
    assert len({result["text"] for result in alive}) == 1, [result["text"] for result in alive]
    return alive


def check_error(alive: list[dict[str, Any]], victim: int, ending: str) -> None:
    text = alive[0]["text"]
    assert f"rank {victim} on {HOST}" in text
    if ending == "raises":
        assert "this rank cannot go on" in text
        assert "to succeed" in text, "the phase"
    else:
        assert "no sign of rank" in text
        assert "within 1.5 s" in text


@pytest.mark.parametrize(("step", "victim", "ending"), sampled("deaths in saves", SAVE_STEPS))
def test_in_a_save(step: str, victim: int, ending: Any, pool: RankPool, saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "iter_0000003"
    arguments = str(target), victim, SAVE_STEPS[step], ending
    results = pool.run(deaths.save, *arguments, ranks=WORLD, may_die={victim} if ending == "dies" else ())
    alive = survivors(results, victim, ending)
    check_error(alive, victim, ending)
    assert {result["error"] for result in alive} == {"RankFailedError" if ending == "raises" else "RankMissingError"}
    assert all(result["unchanged"] for result in alive)
    assert not target.exists()


@pytest.mark.parametrize(("step", "victim", "ending"), sampled("deaths in loads", LOAD_STEPS))
def test_in_a_load(step: str, victim: int, ending: Any, pool: RankPool, saved: Path) -> None:
    arguments = str(saved), victim, LOAD_STEPS[step], ending
    results = pool.run(deaths.load, *arguments, ranks=WORLD, may_die={victim} if ending == "dies" else ())
    check_load(results, step, victim, ending)


@pytest.mark.parametrize(("step", "victim", "ending"), sampled("deaths in exchanges", SHARED_STEPS, share=8))
def test_where_ranks_read_for_each_other(step: str, victim: int, ending: Any, pool: RankPool, saved: Path) -> None:
    arguments = str(saved), victim, SHARED_STEPS[step], ending
    may_die = {victim} if ending == "dies" else ()
    check_load(pool.run(deaths.load_for_each_other, *arguments, ranks=WORLD, may_die=may_die), step, victim, ending)


def check_load(results: list[Any], step: str, victim: int, ending: str) -> None:
    alive = survivors(results, victim, ending)
    check_error(alive, victim, ending)
    if step == "filling":
        assert {result["error"] for result in alive} == {"LoadInterruptedError"}, "live tensors had changed"
    else:
        assert {result["error"] for result in alive} == {
            "RankFailedError" if ending == "raises" else "RankMissingError"
        }
        assert all(result["unchanged"] for result in alive)
