# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A progress bar of bytes on a terminal; anywhere else, and where rich is not installed, nothing."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from mbridge_fsdp_ckpt.io.progress import Progress, Unwatched
from mbridge_fsdp_ckpt.printable import printable

if TYPE_CHECKING:
    from rich.progress import Progress as Shown

PATIENCE = 1.5
"""Seconds that a save or load of a job may take before its bar appears."""

SWITCH = "MBRIDGE_FSDP_CKPT_PROGRESS"
"""The environment variable that turns bars of a job off: 0."""


class Bar:
    """See `Progress`.

    Args:
        shown: What draws it.
        after: Seconds after which it appears, if there is still something to do.
    """

    shown = True

    def __init__(self, shown: Shown, after: float) -> None:
        self._shown, self._due = shown, time.monotonic() + after
        self._task = shown.add_task("", total=None)
        if not after:
            shown.start()

    def begin(self, what: str, total: int) -> None:
        """See `Progress`."""
        self._shown.reset(self._task, description=printable(what), total=total)

    def advance(self, count: int) -> None:
        """See `Progress`."""
        self._shown.advance(self._task, count)
        if not self._shown.live.is_started and time.monotonic() >= self._due:
            self._shown.start()


@contextmanager
def progress_bar(*, after: float = 0.0, wanted: bool = True) -> Iterator[Progress]:
    """Show progress on standard error while the body runs, if that is a terminal.

    Args:
        after: Seconds that the body may take before anything is shown.
        wanted: Whether to show anything at all.
    """
    shown = _drawn() if wanted and find_spec("rich") is not None else None
    if shown is None:
        yield Unwatched()
        return
    try:
        yield Bar(shown, after)
    finally:
        shown.stop()


def _drawn() -> Shown | None:
    """What draws a bar on standard error; None where that is no terminal."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        return None
    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    return progress.Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)


def job_bar(rank: int, *, wanted: bool) -> AbstractContextManager[Progress]:
    """The bar of a job's save or load: of rank 0, of those that last.

    Args:
        rank: This rank.
        wanted: `Settings.progress`.
    """
    wanted = wanted and rank == 0 and os.environ.get(SWITCH) != "0"
    return progress_bar(after=PATIENCE, wanted=wanted and sys.stderr.isatty())  # FORCE_COLOR makes no pipe a terminal
