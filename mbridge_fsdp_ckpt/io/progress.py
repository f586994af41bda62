# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Receivers of progress while many bytes are read or written."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives the number of bytes to process, and of those that are done."""

    @property
    def shown(self) -> bool:
        """Whether progress is shown.  If not, callers need not compute the total."""
        ...

    def begin(self, what: str, total: int) -> None:
        """Begin a step.

        Args:
            what: The name of the step, as it is shown.
            total: Bytes to process in it.
        """
        ...

    def advance(self, count: int) -> None:
        """Add bytes that are done since the last call."""
        ...


class Meter:
    """Reports the growth of a file as progress.

    Args:
        progress: The receiver.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress, self._position = progress, 0

    def reached(self, position: int) -> None:
        """Report that the file is done up to this position."""
        self._progress.advance(position - self._position)
        self._position = position


class Unwatched:
    """A receiver that shows nothing."""

    shown = False

    def begin(self, what: str, total: int) -> None:
        """See `Progress`."""

    def advance(self, count: int) -> None:
        """See `Progress`."""
