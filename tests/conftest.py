"""Fixtures and markers for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import sampling
from tests.whole_run import WholeRun

pytest_plugins = ["mbridge_fsdp_ckpt.testing.pytest_plugin"]

_UNIT = Path(__file__).parent / "unit"


def pytest_configure(config: pytest.Config) -> None:
    """A run of everything, with nothing sampled, leaves its result in docs/soak/."""
    if sampling.FULL and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        config.pluginmanager.register(WholeRun())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests without processes are quick."""
    for item in items:
        if _UNIT in item.path.parents:
            item.add_marker(pytest.mark.quick)
