# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The processes that rank pools fork their workers from, one for each set of imports."""

from __future__ import annotations

import itertools
import tempfile
import weakref
from pathlib import Path

from testing.process import TemplateProcess, rank_environment

START_LIMIT_S = 300.0
"""How long the imports may take: on a busy machine, those of Megatron-Bridge take a minute."""

_OF_ONE_TEST = "PYTEST_CURRENT_TEST"

_Key = tuple[tuple[str, ...], frozenset[tuple[str, str]]]


class Templates:
    """Started when a pool first needs one, and kept for the next pool that imports the same in the same environment.

    Pools that share them import Megatron-Bridge once in a test session, not once a module.  Not for concurrent use.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="templates-")
        self._started: dict[_Key, TemplateProcess] = {}
        self._numbers = itertools.count()
        self._finalizer = weakref.finalize(self, _end, self._started, self._folder)

    def living(self, preload: tuple[str, ...]) -> TemplateProcess:
        """One that has imported `preload`.

        Raises:
            RuntimeError: The imports failed, or took too long.
        """
        environment = {name: value for name, value in rank_environment().items() if name != _OF_ONE_TEST}
        key = preload, frozenset(environment.items())
        if key in self._started and not self._started[key].is_alive:
            self._started.pop(key).kill()
        if key not in self._started:
            log = Path(self._folder.name) / f"{next(self._numbers)}.log"
            self._started[key] = TemplateProcess(log, preload, environment, START_LIMIT_S)
        return self._started[key]

    def close(self) -> None:
        """End them, and with them all workers.  Calling it again does nothing."""
        self._finalizer()


def _end(started: dict[_Key, TemplateProcess], folder: tempfile.TemporaryDirectory[str]) -> None:
    while started:
        started.popitem()[1].kill()
    folder.cleanup()
