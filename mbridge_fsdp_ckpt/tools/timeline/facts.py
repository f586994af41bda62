# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What the picture, the page and the table of a timeline say alike."""

from __future__ import annotations

from datetime import UTC, datetime

from mbridge_fsdp_ckpt.tools.timeline.lanes import NAMED_LANES, SLOWEST, WAITING, Lane, Timeline

SLOW = "#cc0000"
"""The colour of stragglers."""


def facts(found: Timeline) -> list[tuple[str, str]]:
    """Names with what they stand for."""
    clocks = [lane.begun for lane in found.lanes if lane.begun is not None]
    known = [("begun", moment(min(clocks)))] if clocks else []
    took = f"{found.commit:.2f} s" if found.commit is not None else f"{found.end:.2f} s before the commit"
    count = len({one.rank for one in found.stragglers})
    return [*known, ("ranks", f"{len(found.lanes):,}"), ("took", took), ("stragglers", f"{count:,}")]


def moment(unix: float) -> str:
    """A UNIX time for people."""
    try:
        return f"{datetime.fromtimestamp(unix, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError):  # the format allows for years that Python does not
        return f"{unix:.0f} s of UNIX time"


def phase_rows(found: Timeline) -> list[tuple[str, str, str, str, str]]:
    """Of each phase: name, median, the slowest rank's seconds, that rank, how many are stragglers."""
    rows = []
    for name, usual in found.medians.items():
        slowest = max(found.lanes, key=lambda lane: lane.seconds.get(name, 0.0))
        count = sum(one.phase == name for one in found.stragglers)
        marked = "waits" if name in WAITING else str(count)
        rows.append((name, f"{usual:.3f}", f"{slowest.seconds.get(name, 0.0):.3f}", str(slowest.rank), marked))
    return rows


def cells(found: Timeline, lane: Lane) -> list[tuple[str, bool]]:
    """A rank's seconds of each phase, and whether it is a straggler there."""
    return [(f"{lane.seconds.get(name, 0.0):.3f}", (lane.rank, name) in found.slow) for name in found.medians]


def left_out(found: Timeline) -> str:
    """What the table of ranks does not show, in words; empty where it shows all."""
    if len(found.lanes) <= NAMED_LANES:
        return ""
    return f"Shown are the {SLOWEST} ranks with most time of their own, of {len(found.lanes):,}."
