"""Imports of each family with each tensor removed, added, reshaped or cast: refused by its name, or right."""

from __future__ import annotations

from pathlib import Path

import pytest

from mbridge_fsdp_ckpt.testing.ranks import RankPool
from tests.convert import imports
from tests.models import hugging_face
from tests.soak import sampling

pytestmark = [pytest.mark.bridge, pytest.mark.timeout(3000)]

FAMILIES = sampling.drawn("families imported", list(hugging_face.MODELS), share=4)
SHARE = 1 if sampling.FULL else 10


def test_a_tensor_that_is_otherwise_is_refused_by_name_or_right(bridge_ranks: RankPool, tmp_path: Path) -> None:
    found = []
    for name in FAMILIES:
        folder = str(tmp_path / name)
        [cases] = bridge_ranks.run(imports.of_family, name, folder, SHARE, str(sampling.seed()), ranks=1)
        found += [(name, *case) for case in cases]
    missed = [case for case in found if case[-1].startswith("missed")]
    assert missed == [], sampling.how_to_repeat()
    assert found
    assert {outcome for _, kind, _, outcome in found if kind == "doubled"} <= {"right"}
