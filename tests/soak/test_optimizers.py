# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Every optimizer x what may be otherwise at a load: each element is right, or it was refused and nothing changed.

Memory that nothing has written is NaN, as in all tests that run ranks.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from testing.modules import MEGATRON_MODULES, is_installed
from testing.outcomes import RankFailed, RanksHung
from testing.ranks import RankPool
from testing.templates import Templates
from tests.patience import patient_ranks
from tests.soak import optimizers, sampling
from tests.soak.optimizer_cases import ANOTHER, CHANGES, KINDS, Case, matrix
from tests.soak.optimizers import Ended

RANKS = 2
SHARE = 24  # one in so many cases runs by default
AT_ONCE = 24  # cases of one world


@pytest.fixture(scope="module")
def pool(templates: Templates) -> Iterator[RankPool]:
    yield from patient_ranks(templates, ("megatron.core",), MEGATRON_MODULES, RANKS)


def possible() -> list[Case]:
    """All cases that this machine can run; those of the same layouts one after the other."""
    has_engine = is_installed("transformer_engine")
    cases = [case for case in matrix() if has_engine or not any(kind.needs_engine for kind in case.kinds)]
    return sorted(cases, key=lambda case: (case.how.saved.tensor, case.how.live.tensor))


def test_a_load_is_right_to_the_last_element_or_refused(pool: RankPool, tmp_path: Path) -> None:
    begin, cases, outcomes, wrong = time.monotonic(), sampling.drawn("optimizers", possible(), SHARE), [], []
    for first in range(0, len(cases), AT_ONCE):
        some = cases[first : first + AT_ONCE]
        for case, ended in zip(some, ended_on_all_ranks(pool, some, tmp_path / str(first)), strict=True):
            kind = case.change if case.saved == case.live else f"{case.change}: a checkpoint of {case.saved}"
            outcomes.append((kind, "loaded, every element right" if ended.how == "loaded" else ended.how))
            if ended.wrong:
                wrong.append(f"{case}, {ended.how}: {'; '.join(ended.wrong)}")
    found = sampling.tally(outcomes)
    print(f"{len(cases)} cases in {time.monotonic() - begin:.0f} s: {found}; {sampling.how_to_repeat()}")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(cases)} cases; {sampling.how_to_repeat()}", *wrong])
    sampling.record("optimizers", sampling.Result(time.monotonic() - begin, found))


def ended_on_all_ranks(pool: RankPool, cases: Sequence[Case], place: Path) -> list[Ended]:
    """How each case ended, and whether all ranks saw the same; one that ends a world does not end the others."""
    try:
        by_rank = pool.run(optimizers.run, str(place), cases, ranks=RANKS, time_limit=60.0 + 10.0 * len(cases))
    except (RankFailed, RanksHung) as failure:
        if len(cases) == 1:
            return [Ended("", wrong=[f"{type(failure).__name__}: {str(failure)[:4000]}"])]
        alone = [ended_on_all_ranks(pool, [case], place / str(number)) for number, case in enumerate(cases)]
        return [ended for each in alone for ended in each]
    return [_same(*seen) for seen in zip(*by_rank, strict=True)]


def _same(first: Ended, *others: Ended) -> Ended:
    for other in others:
        if (other.how, other.text) != (first.how, first.text):
            wrong = f"ranks end otherwise: {first.how} {first.text!r}, {other.how} {other.text!r}"
            return Ended(first.how, first.text, [*first.wrong, wrong])
    return first


def test_the_matrix_has_every_optimizer_and_every_change() -> None:
    cases = list(matrix())
    assert len(cases) == len(set(map(repr, cases))) > 500
    assert {case.change for case in cases} >= {*CHANGES, ANOTHER}
    assert {case.saved for case in cases} == {case.live for case in cases} == set(KINDS)
    assert min(Counter(case.change for case in cases).values()) >= 2


def test_every_element_is_looked_at(pool: RankPool) -> None:
    """Both ranks change one of theirs."""
    for told in pool.run(optimizers.told_of_changes, ranks=RANKS):
        assert set(told) == {"weight", "master", "exp_avg", "exp_avg_sq", "step", "eps"}
        for name, texts in told.items():
            found = [text for text in texts if text.startswith(f"{name} ") or f" {name}:" in text]
            assert found, (name, texts)
            assert name in ("step", "eps") or re.search(r": [12] of \d{4} elements", found[0]), found
