# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Training runs that are patient with gloo.

On a busy machine gloo now and then hangs, aborts the process or loses a connection in the middle of a training step,
with stock as with this package.  Such a run is tried once more from the checkpoints it began with.  A hang in this
package fails at once, as does every other exception.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from testing.modules import installed, is_installed
from testing.outcomes import RankFailed, RanksHung
from testing.pytest_plugin import RANKS
from testing.ranks import RankPool
from testing.templates import Templates

HANG_S = 100.0
KILLED = "the process ended with return code -"
LOST_CONNECTION = "/gloo/transport/"


class PatientPool(RankPool):
    """A pool that repeats a training run which gloo broke."""

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """See `RankPool.run`."""
        run = super().run
        return patiently(
            lambda: run(function, *args, **{"time_limit": HANG_S, **kwargs}),
            directories=[Path(arg.directory) for arg in args if hasattr(arg, "directory")],
            what=f"{function.__module__}.{function.__qualname__}{args}",
        )


def patient_ranks(
    templates: Templates | None, needed: Sequence[str], preload: Sequence[str], ranks: int = RANKS
) -> Iterator[RankPool]:
    """A fixture's body: a `RankPool` with `preload` imported; skips the tests where a needed package is missing."""
    for package in needed:
        if not is_installed(package):
            pytest.skip(f"needs {package}, which is not installed")
    with PatientPool(ranks, preload=installed(preload), templates=templates) as pool:
        yield pool


def patiently[T](run: Callable[[], T], directories: Collection[Path], what: str) -> T:
    """Call `run`, and once more if gloo broke it, with the directories as they were before."""
    before = [(directory, _copied(directory)) for directory in directories]
    try:
        return run()
    except (RanksHung, RankFailed) as failure:
        if not is_gloos(failure):
            raise
        warnings.warn(f"a training run hung or died in gloo and is repeated: {what}\n{failure}", stacklevel=3)
    for directory, copy in before:
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(copy, directory)
    return run()


def _copied(directory: Path) -> Path:
    copy = directory.parent / f"{directory.name}.before"
    shutil.rmtree(copy, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copytree(directory, copy))


def is_gloos(failure: RanksHung | RankFailed) -> bool:
    """Whether gloo broke a run: some rank was killed, all lost a connection, or they wait outside this package."""
    if isinstance(failure, RankFailed):
        texts = failure.tracebacks.values()
        return any(text.startswith(KILLED) for text in texts) or all(LOST_CONNECTION in text for text in texts)
    return not any(_is_ours(line) for stack in failure.stacks.values() for line in stack.splitlines())


def _is_ours(line: str) -> bool:
    return "/mbridge_fsdp_ckpt/" in line and "/testing/" not in line
