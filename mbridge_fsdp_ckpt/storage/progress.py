"""Who watches while many bytes are read or written."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Is told how much there is to do, and what is done of it."""

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


class Unwatched:
    """Nobody looks."""

    shown = False

    def begin(self, what: str, total: int) -> None:
        """See `Progress`."""

    def advance(self, count: int) -> None:
        """See `Progress`."""
