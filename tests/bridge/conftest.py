"""Bridge's ranks, patient with gloo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mbridge_fsdp_ckpt.testing.modules import BRIDGE_MODULES, is_installed
from mbridge_fsdp_ckpt.testing.pytest_plugin import RANKS
from mbridge_fsdp_ckpt.testing.ranks import RankPool
from tests.patience import PatientPool


@pytest.fixture(scope="package")
def bridge_ranks() -> Iterator[RankPool]:
    """Up to four ranks that have imported Transformer Engine and Megatron-Bridge."""
    for package in ("transformer_engine", "megatron.bridge"):
        if not is_installed(package):
            pytest.skip(f"needs {package}, which is not installed")
    with PatientPool(RANKS, preload=BRIDGE_MODULES) as pool:
        yield pool
