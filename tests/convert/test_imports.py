# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Imports of each family with each tensor removed, added, reshaped or cast: refused by its name, or right."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from testing.ranks import RankPool
from tests.convert import imports
from tests.models import hugging_face
from tests.soak import sampling

pytestmark = [pytest.mark.bridge, pytest.mark.timeout(3000)]

FAMILIES = sampling.drawn("families imported", list(hugging_face.MODELS), share=len(hugging_face.MODELS))
SHARE = 1 if sampling.FULL else 10


def test_a_tensor_that_is_otherwise_is_refused_by_name_or_right(bridge_ranks: RankPool, tmp_path: Path) -> None:
    began, found = time.monotonic(), []
    for name in FAMILIES:
        folder = str(tmp_path / name)
        line = (name, folder, SHARE, str(sampling.seed()))
        [cases] = bridge_ranks.run(imports.of_family, *line, ranks=1, time_limit=900)
        found += [(name, *case) for case in cases]
    missed = [case for case in found if case[-1].startswith("missed")]
    assert missed == [], f"{missed} {sampling.how_to_repeat()}"
    assert found
    assert {outcome for _, kind, _, outcome in found if kind == "doubled"} <= {"right"}
    outcomes = sampling.tally((f"{name}: {kind}", outcome) for name, kind, _, outcome in found)
    sampling.record("imports", sampling.Result(time.monotonic() - began, outcomes))
