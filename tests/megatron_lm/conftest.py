"""Ranks that have imported Transformer Engine and Megatron-LM's training loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mbridge_fsdp_ckpt.testing.modules import MEGATRON_MODULES, is_installed
from mbridge_fsdp_ckpt.testing.pytest_plugin import RANKS
from mbridge_fsdp_ckpt.testing.ranks import RankPool
from tests.patience import PatientPool


@pytest.fixture(scope="package")
def training_ranks() -> Iterator[RankPool]:
    """Up to four ranks."""
    for package in ("transformer_engine", "megatron.training"):
        if not is_installed(package):
            pytest.skip(f"needs {package}, which is not installed")
    with PatientPool(RANKS, preload=MEGATRON_MODULES) as pool:
        yield pool
