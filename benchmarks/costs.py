# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a call cost: seconds, collectives, meetings."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["save", "load"]
Part = Literal["preparation", "gather"]


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call cost one rank, or the slowest one.

    Args:
        seconds: Wall-clock time.
        collectives: Calls of collectives, barriers included.
        meetings: Meetings of all ranks in the rendezvous store, which this package has instead.
    """

    seconds: float = 0.0
    collectives: int = 0
    meetings: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.collectives + other.collectives, self.meetings + other.meetings)


@dataclass(frozen=True, slots=True)
class Call:
    """One save or load of one rank.

    Args:
        kind: Which.
        whole: All of it.
        preparation: The part before anything is agreed or written.
        names: How often each collective was called.
        gather: The end of a load of ours, in which Megatron-FSDP gathers what it has loaded.
    """

    kind: Kind
    whole: Cost
    preparation: Cost
    names: dict[str, int]
    gather: Cost


def slowest(costs: Iterable[Cost]) -> Cost:
    """The worst of every rank's numbers, each by itself."""
    ranks = list(costs)
    return Cost(
        max(cost.seconds for cost in ranks),
        max(cost.collectives for cost in ranks),
        max(cost.meetings for cost in ranks),
    )


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated measurements of one thing."""

    count: int
    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(len(values), statistics.median(values), min(values), max(values))
