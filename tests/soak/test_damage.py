"""Whatever happens to a file of a checkpoint, a load says so and changes nothing."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mbridge_fsdp_ckpt.testing.ranks import RankPool
from tests.core.conftest import megatron_ranks
from tests.soak import damage, sampling
from tests.unit import test_json_schema

__all__ = ["megatron_ranks"]

pytestmark = pytest.mark.timeout(3000)
CASES = 2_000


@pytest.fixture(scope="module")
def saved(megatron_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """Two saves of one model on two ranks, and what was live at the first."""
    root = tmp_path_factory.mktemp("damage")
    one, other = root / "iter_0000002", root / "iter_0000003"
    live = megatron_ranks.run(damage.save, str(one), 2, ranks=2)[0]
    megatron_ranks.run(damage.save, str(other), 3, ranks=2)
    return one, other, live


def test_two_saves_differ_in_every_file(saved: tuple[Path, Path, dict[str, Any]]) -> None:
    one, other = (damage.contents(path) for path in saved[:2])
    assert list(one) == list(other)
    assert len(one) == 10
    assert [name for name in one if one[name] == other[name]] == []


def test_a_real_checkpoint_is_valid_by_the_schemas(saved: tuple[Path, Path, dict[str, Any]]) -> None:
    assert test_json_schema.check_directory(saved[0]) > 20


def test_every_damage_is_refused_by_name(
    saved: tuple[Path, Path, dict[str, Any]], megatron_ranks: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, live = saved
    names = list(damage.contents(one))
    cases = sampling.drawn("damage", damage.matrix(names, CASES))
    began = time.monotonic()
    [(seen, at_the_end)] = megatron_ranks.run(
        damage.try_all, str(one), str(other), cases, ranks=1, time_limit=60 + 1.2 * len(cases)
    )
    with capsys.disabled():
        print(f"\n{len(seen)} damages; {sampling.how_to_repeat()}")
    by_file = Counter(name for result in seen for name in (result.case.name, result.case.other) if name)
    facts = {
        "cases by file": ", ".join(f"{name} {by_file[name]}" for name in sorted(by_file)),
    }
    outcomes = sampling.tally((result.case.kind, result.outcome) for result in seen)
    sampling.record("damage", sampling.Result(time.monotonic() - began, outcomes, facts))
    missed = [result for result in seen if result.outcome.startswith("missed")]
    assert missed == [], sampling.how_to_repeat()
    assert len(seen) == len(cases)
    assert at_the_end == live, "the undamaged checkpoint did not come back"


def test_a_missing_manifest_is_not_taken_for_a_stock_checkpoint(
    saved: tuple[Path, Path, dict[str, Any]], megatron_ranks: RankPool
) -> None:
    one, other, _ = saved
    case = damage.Case("missing", damage.MANIFEST, 0)
    [([seen], _)] = megatron_ranks.run(damage.try_all, str(one), str(other), [case], ranks=1)
    assert not seen.outcome.startswith("missed"), seen
