# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A job that saves in the background for days holds as much at its end as after its tenth save."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.modules import MEGATRON_MODULES
from testing.ranks import RankPool
from testing.templates import Templates
from tests.patience import patient_ranks
from tests.soak import many, sampling

RANKS = 2
ALL, SAMPLE = 2000, 40
GROWS_BY = 16 << 20
"""Bytes by which a process may grow in all saves: 8 KiB a save, and what the allocator keeps."""


@pytest.fixture(scope="module")
def pool(templates: Templates) -> Iterator[RankPool]:
    yield from patient_ranks(templates, ("megatron.core",), MEGATRON_MODULES, RANKS)


@pytest.mark.timeout(3600)
def test_saves_by_the_thousand_hold_what_ten_do(pool: RankPool, tmp_path: Path) -> None:
    saves = ALL if sampling.FULL else SAMPLE
    for rank, (first, last) in enumerate(pool.run(many.run, str(tmp_path), saves, ranks=RANKS, time_limit=3000.0)):
        print(f"rank {rank}, after {many.FIRST} saves {first}, after {saves} {last}")
        for name, held in last.items():
            assert held <= first[name] + (GROWS_BY if "bytes" in name else 0), f"rank {rank}, {name}"
