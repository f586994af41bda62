# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Bridge's ranks, patient with gloo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testing.modules import BRIDGE_MODULES
from testing.ranks import RankPool
from testing.templates import Templates
from tests.patience import patient_ranks


@pytest.fixture(scope="package")
def bridge_ranks(templates: Templates) -> Iterator[RankPool]:
    """Up to four ranks that have imported Transformer Engine and Megatron-Bridge."""
    yield from patient_ranks(templates, ("transformer_engine", "megatron.bridge"), BRIDGE_MODULES)
