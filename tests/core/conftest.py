"""Megatron's ranks, patient with gloo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mbridge_fsdp_ckpt.testing.modules import MEGATRON_MODULES, installed, is_installed
from mbridge_fsdp_ckpt.testing.pytest_plugin import RANKS
from mbridge_fsdp_ckpt.testing.ranks import RankPool
from tests.patience import PatientPool


@pytest.fixture(scope="package")
def megatron_ranks() -> Iterator[RankPool]:
    """Up to four ranks that have imported Megatron-Core, and Transformer Engine where that is installed."""
    if not is_installed("megatron.core"):
        pytest.skip("needs megatron.core, which is not installed")
    with PatientPool(RANKS, preload=installed(MEGATRON_MODULES)) as pool:
        yield pool
