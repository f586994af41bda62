# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Ranks that have imported VeRL's Megatron engine, and the model that they train."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testing.modules import BRIDGE_MODULES
from testing.ranks import RankPool
from testing.templates import Templates
from tests.patience import patient_ranks
from tests.verl import tiny
from tests.verl.fresh import Fresh

RANKS = 2


@pytest.fixture(scope="package")
def verl_ranks(templates: Templates) -> Iterator[RankPool]:
    """Two ranks."""
    modules = (*BRIDGE_MODULES, "verl.workers.engine.megatron.transformer_impl")
    yield from patient_ranks(templates, ("transformer_engine", "megatron.bridge", "verl"), modules, RANKS)


@pytest.fixture(scope="package")
def source(verl_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Hugging Face model."""
    directory = str(tmp_path_factory.mktemp("model") / "tiny")
    verl_ranks.run(tiny.write_model, directory, ranks=1)
    return directory


@pytest.fixture(scope="package")
def fresh() -> Iterator[Fresh]:
    """Processes that have imported neither VeRL nor this package."""
    with Fresh() as process:
        yield process
