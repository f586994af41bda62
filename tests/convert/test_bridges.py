# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Each model that Megatron-Bridge has a bridge for ends as docs/bridges.json says: identical, or why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.ranks import RankPool
from tests.convert import bridges
from tests.soak import sampling

pytestmark = pytest.mark.bridge

VERSIONS, ENDINGS = bridges.recorded()
MADE = [name for name, ending in ENDINGS.items() if ending.kind != "unknown"]
ANEW = "run: python -m tests.convert.bridges"


@pytest.fixture(autouse=True)
def _recorded_versions(bridge_ranks: RankPool) -> None:
    if bridges.installed_versions() != VERSIONS:
        pytest.skip(f"docs/bridges.json holds for {VERSIONS}")


@pytest.mark.parametrize("name", sampling.drawn("bridges", MADE, share=len(MADE) // 2))
def test_a_model_ends_as_recorded(name: str, bridge_ranks: RankPool, tmp_path: Path) -> None:
    assert bridges.there_and_back(name, tmp_path, bridge_ranks) == ENDINGS[name], ANEW


def test_every_model_of_bridge_is_recorded(bridge_ranks: RankPool) -> None:
    (known,) = bridge_ranks.run(bridges.known, ranks=1)
    assert known == {name: ending.kind != "unknown" for name, ending in ENDINGS.items()}, ANEW
