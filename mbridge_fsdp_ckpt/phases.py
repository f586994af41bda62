# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""How long the phases of a save or load take, on this rank, and the one line that a log has of it."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

_log = logging.getLogger("mbridge_fsdp_ckpt.checkpoint")  # whoever saves or loads
_PLAIN = re.compile(r"[!#-<>-\[\]-~]+")
"""Text that stands in a line as it is: ASCII that prints, without blanks, quotes, = and backslashes."""


class Phase(NamedTuple):
    """A phase that has ended.

    Args:
        name: The name of the phase, which may occur more than once.
        begin: Seconds since the clock began.
        seconds: How long it took.
    """

    name: str
    begin: float
    seconds: float


class Phases:
    """The clock of one save or load.

        phases = Phases()
        with phases("write"):
            ...

    Phases do not overlap, or their seconds would count twice.  One that ends by an error counts, too.
    """

    def __init__(self) -> None:
        self.begun = time.time()
        """When it began: UNIX time, by this host's clock."""
        self.ended: list[Phase] = []
        self._start = time.monotonic()

    def to_wire(self) -> list[Any]:
        """As JSON-able data, for another process of this host."""
        return [self.begun, self._start, self.ended]

    @classmethod
    def from_wire(cls, data: list[Any]) -> Phases:
        """Continue the clock in another process."""
        clock = cls()
        clock.begun, clock._start, ended = data
        clock.ended = [Phase(*phase) for phase in ended]
        return clock

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Around a phase."""
        return _Around(self, name)

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._start

    @property
    def rounded(self) -> list[Phase]:
        """The phases that have ended, in whole microseconds."""
        return [Phase(phase.name, round(phase.begin, 6), round(phase.seconds, 6)) for phase in self.ended]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each phase, in the order in which they first came."""
        total: dict[str, float] = {}
        for phase in self.ended:
            total[phase.name] = total.get(phase.name, 0.0) + phase.seconds
        return total


class _Around:
    """One phase of a clock.  A class, for training waits while it is made: it takes half as long as a generator.

    Args:
        clock: The clock.
        name: The name of the phase.
    """

    def __init__(self, clock: Phases, name: str) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        self._begin = self._clock.elapsed

    def __exit__(self, *raised: object) -> None:
        self._clock.ended.append(Phase(self._name, self._begin, self._clock.elapsed - self._begin))


class Spent(Protocol):
    """What a save or load cost."""

    @property
    def bytes(self) -> int:
        """Bytes of payload that this rank wrote or read."""

    @property
    def bytes_of_all(self) -> int:
        """Bytes of payload that all ranks wrote or read."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """By phase, of this rank."""

    @property
    def duration(self) -> float:
        """Seconds from the call to its end."""


def rate(spent: Spent) -> float:
    """GB/s (10**9 bytes) of all ranks together, over the whole duration."""
    return spent.bytes_of_all / spent.duration / 1e9 if spent.duration > 0 else 0.0


def tell(what: str, directory: str, spent: Spent, **more: float) -> None:
    """Log the line of a save or load; see `line`."""
    _log.info("%s", line(what, directory, spent, **more))


def line(what: str, directory: str, spent: Spent, **more: float) -> str:
    """One line for a log: a word, then name=value with a blank between.

    A value is a JSON string where it is not plain text, so that a line can be taken apart whatever a path is called.

    Args:
        what: "save" or "load".
        directory: The directory of the checkpoint.
        spent: The result, with bytes and seconds.
        more: Seconds by what took them, beside the phases.
    """
    fields = {
        "directory": directory if _PLAIN.fullmatch(directory) else json.dumps(directory),
        "bytes": str(spent.bytes_of_all),
        "rank_bytes": str(spent.bytes),
        "seconds": f"{spent.duration:.3f}",
        "gb_per_s": f"{rate(spent):.3f}",
        **{name: f"{seconds:.3f}" for name, seconds in {**more, **spent.seconds}.items()},
    }
    return " ".join((what, *(f"{name}={value}" for name, value in fields.items())))
