# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The timeline as a picture: a lane a rank, time from left to right, stragglers in red."""

from __future__ import annotations

from typing import Any

from mbridge_fsdp_ckpt.tools.drawing import (
    FAINT,
    INK,
    content_of,
    elided,
    folded,
    require_matplotlib,
    tidy,
    write_heading,
    write_notes,
)
from mbridge_fsdp_ckpt.tools.timeline.facts import SLOW, facts
from mbridge_fsdp_ckpt.tools.timeline.lanes import NAMED_LANES, Lane, Timeline

_WIDTH, _LEFT, _RIGHT = 14.0, 0.9, 3.4  # inches
_ROW, _FEWEST, _MOST = 0.26, 3, 9.0  # inches of a lane, lanes that always fit, inches of all lanes
_MARKED = 24
"""Stragglers that are named beside their lanes."""


def draw_png(found: Timeline) -> bytes:
    """The picture.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    lanes, notes = found.drawn, folded(found.notes)
    lanes_height = min(_MOST, max(_FEWEST, len(lanes)) * _ROW)
    head, foot = 1.15, 0.75 + 0.2 * len(notes)
    height = head + lanes_height + foot
    figure = require_matplotlib()(figsize=(_WIDTH, height), facecolor="white")
    said = "   ·   ".join(f"{name} {text}" for name, text in facts(found))
    write_heading(figure, found.directory, said, height)
    size = (1 - (_LEFT + _RIGHT) / _WIDTH, lanes_height / height)
    axes = figure.add_axes((_LEFT / _WIDTH, foot / height, *size))
    _draw_lanes(axes, found, lanes)
    _draw_legend(axes, found, lanes_height)
    write_notes(figure, notes, foot, height)
    return content_of(figure)


def _draw_lanes(axes: Any, found: Timeline, lanes: list[Lane]) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    few = len(lanes) <= NAMED_LANES
    thick, palette = (0.72 if few else 1.0), found.palette
    usual: tuple[list[Any], list[str]] = [], []
    late: tuple[list[Any], list[str]] = [], []
    for row, lane in enumerate(lanes):
        for phase in lane.phases:
            patches, faces = late if (lane.rank, phase.name) in found.slow else usual
            corner = lane.start + phase.begin, row - thick / 2
            patches.append(Rectangle(corner, phase.seconds, thick))
            faces.append(palette[phase.name])
    axes.add_collection(PatchCollection(usual[0], facecolors=usual[1], linewidths=0))
    if late[0]:
        edge = 1.6 if few else 0.8
        axes.add_collection(PatchCollection(late[0], facecolors=late[1], edgecolors=SLOW, linewidths=edge))
    axes.set_xlim(0, max(found.end, 1e-6) * 1.01)
    axes.set_ylim(max(_FEWEST, len(lanes)) - 0.5, -0.5)
    if few:
        axes.set_yticks(range(len(lanes)), [f"rank {lane.rank}" for lane in lanes])
    else:
        rows = range(0, len(lanes), -(-len(lanes) // 12))
        axes.set_yticks(list(rows), [f"{lanes[row].rank:,}" for row in rows])
        axes.set_ylabel("rank", fontsize=9, color=FAINT)
    axes.set_xlabel("seconds since the first rank began", fontsize=9, color=FAINT)
    _mark(axes, found, lanes)
    tidy(axes, keep="bottom")


def _mark(axes: Any, found: Timeline, lanes: list[Lane]) -> None:
    """Name the slowest stragglers beside their lanes, as many as have room, and say where the commit was."""
    if found.commit is not None:
        axes.axvline(found.commit, color=INK, linewidth=0.9, linestyle=":")
        axes.annotate(
            "commit", (found.commit, 1), (0, 3), xycoords=("data", "axes fraction"), textcoords="offset points",
            fontsize=8, color=INK, ha="right",
        )  # fmt: skip
    rows = {lane.rank: row for row, lane in enumerate(lanes)}
    room = max(_FEWEST, len(lanes)) / _MARKED if len(lanes) > NAMED_LANES else 0.9
    taken: list[float] = []
    for rank in dict.fromkeys(one.rank for one in found.stragglers):
        row = rows.get(rank)
        if row is None or len(taken) >= _MARKED or any(abs(row - other) < room for other in taken):
            continue
        taken.append(row)
        phases = [f"{one.phase} {one.seconds:.2f} s" for one in found.stragglers if one.rank == rank]
        text = f"◀ rank {rank}: {', '.join(phases)}"
        place = axes.get_yaxis_transform()
        axes.text(1.005, row, elided(text, 44), transform=place, fontsize=8, color=SLOW, va="center")


def _draw_legend(axes: Any, found: Timeline, height: float) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in found.palette.items()]
    if found.stragglers:
        handles.append(Patch(facecolor="white", edgecolor=SLOW, linewidth=1.6, label="straggler"))
    place = (-0.01, 1 + 0.06 / height)
    axes.legend(
        handles=handles, ncols=len(handles), frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=place,
        handlelength=1.0, columnspacing=1.4, borderpad=0.1,
    )  # fmt: skip
