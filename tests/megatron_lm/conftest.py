# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Ranks that have imported Transformer Engine and what Megatron-LM's training loop imports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testing.modules import MEGATRON_MODULES
from testing.ranks import RankPool
from testing.templates import Templates
from tests.patience import patient_ranks


@pytest.fixture(scope="package")
def training_ranks(templates: Templates) -> Iterator[RankPool]:
    """Up to four ranks."""
    yield from patient_ranks(
        templates, ("transformer_engine", "megatron.training"), (*MEGATRON_MODULES, "tests.megatron_lm.preloaded")
    )
