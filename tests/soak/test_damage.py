# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Whatever happens to a file of a checkpoint, a load says so and changes nothing."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from testing.ranks import RankPool
from tests.core import cases
from tests.core.conftest import megatron_ranks
from tests.soak import damage, sampling
from tests.unit import test_json_schema

__all__ = ["megatron_ranks"]

pytestmark = pytest.mark.timeout(3000)
CASES = 2_000

LARGEST = 1 << 11
"""Bytes of a record, of which a quarter is hashed at a time: matrices have several, with checksums of their parts."""


@pytest.fixture(scope="module")
def saved(megatron_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """Two saves of one model on two ranks, and what was live at the first."""
    root = tmp_path_factory.mktemp("damage")
    one, other = root / "iter_0000002", root / "iter_0000003"
    live = megatron_ranks.run(cases.with_small_records, LARGEST, damage.save, str(one), 2, ranks=2)[0]
    megatron_ranks.run(cases.with_small_records, LARGEST, damage.save, str(other), 3, ranks=2)
    return one, other, live


def test_two_saves_differ_in_every_file(saved: tuple[Path, Path, dict[str, Any]]) -> None:
    one, other = (damage.contents(path) for path in saved[:2])
    assert list(one) == list(other)
    assert len(one) == 11
    assert [name for name in one if one[name] == other[name]] == []


def test_a_real_checkpoint_is_valid_by_the_schemas(saved: tuple[Path, Path, dict[str, Any]]) -> None:
    assert test_json_schema.check_directory(saved[0]) == 3


LAYOUTS = {1: ("damage", CASES, ("rank_00001.index",)), 2: ("damage, same layout", 200, ("group_00000.index",))}
"""By ranks that load: what the draw is called, how many cases, and the index file that such a load does not need."""


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_every_damage_is_refused_by_name(
    ranks: int,
    saved: tuple[Path, Path, dict[str, Any]],
    megatron_ranks: RankPool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the load that reads what is damaged, and by `verify` always."""
    one, other, live = saved
    name, count, unread = LAYOUTS[ranks]
    names = list(damage.contents(one))
    drawn = sampling.drawn(name, damage.matrix(names, count))
    began = time.monotonic()
    arguments = str(one), str(other), drawn, unread, live
    [(seen, at_the_end), *rest] = megatron_ranks.run(
        cases.with_small_records, LARGEST, damage.try_all, *arguments, ranks=ranks, time_limit=60 + 1.5 * len(drawn)
    )
    with capsys.disabled():
        print(f"\n{len(seen)} damages; {sampling.how_to_repeat()}")
    if ranks == 1:
        _record(seen, time.monotonic() - began)
    missed = [result for found in (seen, *(found for found, _ in rest)) for result in found if _missed(result)]
    assert missed == [], sampling.how_to_repeat()
    assert len(seen) == len(drawn)
    assert at_the_end == live, "the undamaged checkpoint did not come back"


def _missed(result: damage.Seen) -> bool:
    return result.outcome.startswith("missed")


def _record(seen: list[damage.Seen], seconds: float) -> None:
    by_file = Counter(name for result in seen for name in (result.case.name, result.case.other) if name)
    facts = {
        "cases by file": ", ".join(f"{name} {by_file[name]}" for name in sorted(by_file)),
    }
    outcomes = sampling.tally((result.case.kind, result.outcome) for result in seen)
    sampling.record("damage", sampling.Result(seconds, outcomes, facts))


def test_a_missing_manifest_is_not_taken_for_a_stock_checkpoint(
    saved: tuple[Path, Path, dict[str, Any]], megatron_ranks: RankPool
) -> None:
    one, other, live = saved
    arguments = str(one), str(other), [damage.Case("missing", damage.MANIFEST, 0)], (), live
    [([seen], _)] = megatron_ranks.run(cases.with_small_records, LARGEST, damage.try_all, *arguments, ranks=1)
    assert not seen.outcome.startswith("missed"), seen
