# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The timeline of a save: a lane a rank, its phases in it, and which of them took far longer than the other ranks'.

Hosts' clocks may differ.  All ranks leave the first meeting at the same moment, but for milliseconds: lanes are placed
so that these ends meet, and by the clocks only where a lane has none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from mbridge_fsdp_ckpt.errors import NoTimesError
from mbridge_fsdp_ckpt.format.reader import SafeSource
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.opening import open_checkpoint
from mbridge_fsdp_ckpt.phases import Phase
from mbridge_fsdp_ckpt.tools.drawing import FEW

MEETING = "agree"
"""The phase in which ranks wait for each other."""
WAITING = (MEETING, "wait")
"""Phases that are nobody's own time."""
SLOWER, BY_SECONDS = 1.5, 0.1
"""A straggler takes more than so many times the median of a phase, and by more than so many seconds."""
RULE = f"A straggler is a rank that takes more than {SLOWER} x the median of a phase, and over {BY_SECONDS} s more."

_REDDISH = FEW[1]

NAMED_LANES = 32
"""Up to so many lanes are shown one by one; of more, the slowest."""
SLOWEST = 10
DRAWN_LANES = 1_024
"""At most so many lanes are drawn; of more, each is the slowest of some neighbours."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One rank's part of a save.

    Args:
        rank: The rank.
        start: When it began, in seconds after the first rank did.
        phases: Its phases, in order; begins are seconds after `start`.
        begun: When that was: UNIX time by its host's clock; None where it does not say.
    """

    rank: int
    start: float
    phases: tuple[Phase, ...]
    begun: float | None = None

    @property
    def end(self) -> float:
        """When its last phase ended, in seconds after the first rank began."""
        return self.start + max(phase.begin + phase.seconds for phase in self.phases)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase."""
        total: dict[str, float] = defaultdict(float)
        for phase in self.phases:
            total[phase.name] += phase.seconds
        return dict(total)

    @property
    def own(self) -> float:
        """Seconds that it did not wait for others."""
        return sum(seconds for name, seconds in self.seconds.items() if name not in WAITING)


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that took far longer for a phase than most."""

    rank: int
    phase: str
    seconds: float
    usual: float

    @property
    def said(self) -> str:
        """In words."""
        return f"rank {self.rank}: {self.phase} {self.seconds:.2f} s, median {self.usual:.2f} s"


@dataclass(frozen=True, slots=True)
class Timeline:
    """All lanes.

    Args:
        directory: The checkpoint.
        lanes: By rank.
        commit: When the metadata was made, in seconds after the first rank began; None where it does not say.
        medians: Of each phase, seconds; in the order in which phases come.
        stragglers: The slowest first.
        slow: The rank and phase of each.
    """

    directory: str
    lanes: tuple[Lane, ...]
    commit: float | None
    medians: Mapping[str, float]
    stragglers: tuple[Straggler, ...]
    slow: frozenset[tuple[int, str]]

    @classmethod
    def of(cls, directory: str, lanes: Iterable[Lane], committed: float | None = None) -> Timeline:
        """The timeline of these ranks.

        Args:
            directory: The checkpoint.
            lanes: Of all ranks that say something; at least one.  Their `start` does not count.
            committed: UNIX time of the commit, by the clock of the first rank's host.
        """
        placed = _placed(sorted(lanes, key=lambda lane: lane.rank))
        names = dict.fromkeys(phase.name for lane in placed for phase in lane.phases)
        seconds = {name: {lane.rank: lane.seconds.get(name, 0.0) for lane in placed} for name in names}
        usual = {name: median(of.values()) for name, of in seconds.items()}
        found = [
            Straggler(rank, name, took, usual[name])
            for name, of in seconds.items()
            if name not in WAITING
            for rank, took in of.items()
            if took > SLOWER * usual[name] and took - usual[name] > BY_SECONDS
        ]
        found.sort(key=lambda one: (one.usual - one.seconds, one.rank))
        first, commit = placed[0], None
        if committed is not None and first.begun is not None and committed - first.begun >= 0:
            commit = first.start + committed - first.begun
        slow = frozenset((one.rank, one.phase) for one in found)
        return cls(directory, tuple(placed), commit, usual, tuple(found), slow)

    @property
    def end(self) -> float:
        """The last moment of all."""
        return max([*(lane.end for lane in self.lanes), self.commit or 0.0])

    @property
    def palette(self) -> dict[str, str]:
        """A colour for each phase, none of them like red, which is stragglers'; grey where ranks wait."""
        colours = iter([colour for colour in FEW if colour != _REDDISH])
        return {name: "#c4c4c4" if name in WAITING else next(colours, "#777777") for name in self.medians}

    @property
    def slowest(self) -> list[Lane]:
        """All lanes where they are few, else those with most time of their own, the slowest first."""
        if len(self.lanes) <= NAMED_LANES:
            return list(self.lanes)
        return sorted(self.lanes, key=lambda lane: (-lane.own, lane.rank))[:SLOWEST]

    @property
    def _run(self) -> int:
        """Of how many neighbours one is drawn."""
        return -(-len(self.lanes) // DRAWN_LANES)

    @property
    def drawn(self) -> list[Lane]:
        """The lanes of a picture, by rank."""
        run = self._run
        groups = (self.lanes[start : start + run] for start in range(0, len(self.lanes), run))
        return [max(group, key=lambda lane: lane.own) for group in groups]

    @property
    def notes(self) -> list[str]:
        """What is to be known besides, in sentences."""
        found = [RULE]
        if self._run > 1:
            found.append(f"Of each {self._run} neighbouring ranks the one with most time of its own is drawn.")
        return found


def _placed(lanes: Sequence[Lane]) -> list[Lane]:
    """The lanes where they belong, the first at 0."""
    ends = [[p.begin + p.seconds for p in lane.phases if p.name == MEETING] for lane in lanes]
    clocks = [lane.begun for lane in lanes if lane.begun is not None]
    if all(ends):
        starts = [-min(of) for of in ends]
    elif len(clocks) == len(lanes):
        starts = clocks
    else:
        starts = [0.0] * len(lanes)
    first = min(starts)
    return [replace(lane, start=start - first) for lane, start in zip(lanes, starts, strict=True)]


def timeline(directory: AnyPath) -> Timeline:
    """The timeline that a checkpoint tells.

    Raises:
        NoTimesError: It tells none.
        CheckpointError: It cannot be read.
    """
    source, lanes = open_checkpoint(directory), list[Lane]()
    for rank, index in source.own_indexes() if isinstance(source, SafeSource) else ():
        record = index.record()
        if record.phases:
            lanes.append(Lane(rank, 0.0, tuple(Phase(*phase) for phase in record.phases), record.begun))
    if not isinstance(source, SafeSource) or not lanes:
        raise NoTimesError(
            expected="ranks that say how long their part of the save took",
            found=f"none, in {source.metadata.format}",
            remedy="Saves of this release do; stock, earlier releases and conversions do not.",
            key=str(directory),
        )
    return Timeline.of(str(directory), lanes, source.manifest.time)
