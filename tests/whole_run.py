# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a run of every test found, or of a part: how many passed, by folder, and at which commit."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.soak import sampling
from tools.circumstances import commit

CURRENT = "current"
STACK = os.environ.get("STACK", CURRENT)
"""The versions that the tests run on: a folder of requirements/stacks."""

STACKS = Path(__file__).parents[1] / "docs" / "stacks"
"""Where results of other stacks are kept."""

_DESELECTED = "deselected"


class WholeRun:
    """A plug-in of pytest's that counts outcomes, and records them at the end.

    Args:
        tests: "all", or "a part".
    """

    def __init__(self, tests: str) -> None:
        self._tests = tests
        self._began = time.monotonic()
        self._commit = commit()
        self._counts: Counter[tuple[str, str]] = Counter()

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """What a command line leaves out is told."""
        self._counts.update((_folder(item.nodeid), _DESELECTED) for item in items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test counts once: where it failed, was skipped, or when it had run."""
        if report.when == "call" or report.outcome != "passed":
            self._counts[_folder(report.nodeid), report.outcome] += 1

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Keep the result, unless tests were only listed, or interrupted."""
        ran_through = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if session.config.option.collectonly or not ran_through:
            return
        pairs = [pair for pair, count in self._counts.items() for _ in range(count)]
        seconds = time.monotonic() - self._began
        result = sampling.Result(seconds, sampling.tally(pairs), {"commit": self._commit, "tests": self._tests})
        if STACK == CURRENT:
            sampling.record("whole", result)
        else:
            sampling.keep(STACKS / f"{STACK}.json", result)


def _folder(nodeid: str) -> str:
    """tests/core/test_x.py::test_y -> core."""
    return nodeid.split("/")[1]
