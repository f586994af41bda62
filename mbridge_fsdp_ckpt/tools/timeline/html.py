# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The timeline as one HTML file: SVG with tooltips, and tables; it links to nothing."""

from __future__ import annotations

from mbridge_fsdp_ckpt.tools.drawing import render
from mbridge_fsdp_ckpt.tools.timeline.facts import SLOW, cells, facts, left_out, phase_rows
from mbridge_fsdp_ckpt.tools.timeline.lanes import NAMED_LANES, Lane, Timeline

_NAMES, _LANES, _ROW, _THIN = 90, 1240, 22, 3  # pixels
_MARKS = (0.0, 0.25, 0.5, 0.75, 1.0)


def draw_html(found: Timeline) -> str:
    """The page."""
    lanes, end = found.drawn, max(found.end, 1e-6)
    row = _ROW if len(lanes) <= NAMED_LANES else _THIN
    return render(
        "timeline/page.html",
        {"pixels": "{:.2f}".format, "cells": lambda lane: cells(found, lane), "named": _namer(lanes)},
        directory=found.directory,
        facts=facts(found),
        notes=found.notes,
        phases=phase_rows(found),
        palette=found.palette,
        slowest=found.slowest,
        left_out=left_out(found),
        stragglers=[one.said for one in found.stragglers[:100]],
        more=max(0, len(found.stragglers) - 100),
        bars=[(number, lane, bar) for number, lane in enumerate(lanes) for bar in _bars(found, lane)],
        lanes=list(enumerate(lanes)),
        marks=[(_NAMES + _LANES * part, f"{end * part:.2f} s") for part in _MARKS],
        commit=None if found.commit is None else _NAMES + _LANES * found.commit / end,
        scale=_LANES / end,
        place={"names": _NAMES, "row": row, "thick": row - 4 if row > _THIN else row, "slow": SLOW},
        width=_NAMES + _LANES + 60,
        height=len(lanes) * row,
    )


def _bars(found: Timeline, lane: Lane) -> list[tuple[float, float, str, bool, str]]:
    """Of each phase of a lane: begin, seconds, name, whether the rank is a straggler, and all that in words."""
    return [
        (
            lane.start + phase.begin,
            phase.seconds,
            phase.name,
            slow := (lane.rank, phase.name) in found.slow,
            f"rank {lane.rank}: {phase.name} {phase.seconds:.3f} s" + (", straggler" if slow else ""),
        )
        for phase in lane.phases
    ]


def _namer(lanes: list[Lane]) -> dict[int, str]:
    """Names beside lanes: all where they are few."""
    step = 1 if len(lanes) <= NAMED_LANES else -(-len(lanes) // 24)
    return {number: f"rank {lanes[number].rank}" for number in range(0, len(lanes), step)}
