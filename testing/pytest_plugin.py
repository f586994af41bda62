# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Pytest fixtures: rank pools, and what they are forked from, that live as long as the test session.

Activate with `pytest_plugins = ["testing.pytest_plugin"]` in the top conftest.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from testing.modules import BRIDGE_MODULES, MEGATRON_MODULES, installed, is_installed
from testing.ranks import RankPool
from testing.templates import Templates

RANKS = 4


@pytest.fixture(scope="session")
def templates() -> Iterator[Templates]:
    """What all pools are forked from."""
    processes = Templates()
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def rank_pool(templates: Templates) -> Iterator[RankPool]:
    """Up to four ranks that have imported torch alone: they start in two seconds."""
    with RankPool(RANKS, templates=templates) as pool:
        yield pool


@pytest.fixture(scope="session")
def megatron_ranks(templates: Templates) -> Iterator[RankPool]:
    """Up to four ranks that have imported Megatron-Core, and Transformer Engine where that is installed."""
    with RankPool(RANKS, preload=_needed("megatron.core", MEGATRON_MODULES), templates=templates) as pool:
        yield pool


@pytest.fixture(scope="session")
def bridge_ranks(templates: Templates) -> Iterator[RankPool]:
    """Up to four ranks that have imported Transformer Engine and Megatron-Bridge."""
    if not is_installed("transformer_engine"):
        pytest.skip("needs transformer_engine, which is not installed")
    with RankPool(RANKS, preload=_needed("megatron.bridge", BRIDGE_MODULES), templates=templates) as pool:
        yield pool


def _needed(package: str, modules: Sequence[str]) -> list[str]:
    """Those of `modules` that can be imported; skips the test where `package` cannot."""
    if not is_installed(package):
        pytest.skip(f"needs {package}, which is not installed")
    return installed(modules)
