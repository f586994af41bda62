# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Who watches while many bytes are read or written."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives how much there is to do, and what is done of it."""

    @property
    def shown(self) -> bool:
        """Whether anybody looks; if not, nobody has to find out how much there is."""
        ...

    def begin(self, what: str, total: int) -> None:
        """So many bytes of this are to come."""
        ...

    def advance(self, count: int) -> None:
        """So many more bytes are done."""
        ...


class Meter:
    """Tells how far a file has grown.

    Args:
        progress: Whom.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress, self._position = progress, 0

    def reached(self, position: int) -> None:
        """So many bytes of the file are done."""
        self._progress.advance(position - self._position)
        self._position = position


class Unwatched:
    """Nobody looks."""

    shown = False

    def begin(self, what: str, total: int) -> None:
        """See `Progress`."""

    def advance(self, count: int) -> None:
        """See `Progress`."""
