"""Pytest fixtures: rank pools that live as long as the test session.

Activate with `pytest_plugins = ["mbridge_fsdp_ckpt.testing.pytest_plugin"]` in the top conftest.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from mbridge_fsdp_ckpt.testing.ranks import RankPool

RANKS = 4

BRIDGE_MODULES = ("transformer_engine.pytorch", "megatron.bridge.training.pretrain")
"""What a worker of `bridge_ranks` imports, in this order: Transformer Engine looks for CUDA while imported."""


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Up to four ranks that have imported torch; they start when a case first needs them."""
    with RankPool(RANKS) as pool:
        yield pool


@pytest.fixture(scope="session")
def bridge_ranks() -> Iterator[RankPool]:
    """Up to four ranks that have imported Transformer Engine and Megatron-Bridge (about 1.1 GiB each)."""
    for module in ("transformer_engine", "megatron.bridge"):
        if not is_installed(module):
            pytest.skip(f"needs {module}, which is not installed")
    with RankPool(RANKS, preload=BRIDGE_MODULES) as pool:
        yield pool


def is_installed(module: str) -> bool:
    """Whether `module` could be imported; nothing but its parent packages is."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
