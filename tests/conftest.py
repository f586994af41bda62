# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Fixtures and markers for all tests."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

from testing.modules import is_installed
from tests.soak import sampling
from tests.whole_run import CURRENT, STACK, WholeRun

pytest_plugins = ["testing.pytest_plugin"]

hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine fails no property
hypothesis.settings.load_profile("untimed")
_UNIT = Path(__file__).parent / "unit"
_OF_BRIDGE = ("transformer_engine", "megatron.bridge")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--record`: a run of some tests leaves its result, too."""
    parser.addoption("--record", action="store_true", help="keep the result in docs/stacks/, of whichever tests")


def pytest_configure(config: pytest.Config) -> None:
    """A run of everything leaves its result: with nothing sampled in docs/soak/, on another stack in docs/stacks/."""
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if config.option.record or (is_whole and (sampling.FULL or STACK != CURRENT)):
        config.pluginmanager.register(WholeRun("all" if is_whole else "a part"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests without processes are quick; those of Bridge are skipped on a stack that has none."""
    missing = [package for package in _OF_BRIDGE if not is_installed(package)]
    for item in items:
        if missing and item.get_closest_marker("bridge"):
            item.add_marker(pytest.mark.skip(reason=f"needs {' and '.join(missing)}"))
        if _UNIT in item.path.parents:
            item.add_marker(pytest.mark.quick)
