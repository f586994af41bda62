# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Megatron's ranks, patient with gloo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testing.modules import MEGATRON_MODULES
from testing.ranks import RankPool
from testing.templates import Templates
from tests.patience import patient_ranks


@pytest.fixture(scope="package")
def megatron_ranks(templates: Templates) -> Iterator[RankPool]:
    """Up to four ranks that have imported Megatron-Core, and Transformer Engine where that is installed."""
    yield from patient_ranks(templates, ("megatron.core",), MEGATRON_MODULES)
