# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What `benchmarks.disk` and `benchmarks.beside` found, as pictures: a panel a model, a row a kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

Found = Mapping[str, Mapping[str, Any]]

OURS, OURS_LIGHT, DCP, OTHER = "#0072b2", "#8fc1e0", "#e69f00", "#7a7a7a"
"""Told apart by whoever sees fewer colours, too: they differ in lightness, and each row says what it is."""

_DISK = {
    "save": ("save: ours", OURS),
    "save, DCP": ("save: DCP", DCP),
    "save, torch_checkpointing": ("save: torch_checkp.", OTHER),
    "load": ("load: ours", OURS),
    "load but for the gather": ("but for the gather", OURS_LIGHT),
    "load, another layout": ("load: ours, resharded", OURS),
    "load but for the gather, another layout": ("but for the gather", OURS_LIGHT),
    "load, DCP": ("load: DCP", DCP),
    "load, another layout, DCP": ("load: DCP, resharded", DCP),
    "load, torch_checkpointing": ("load: torch_checkp.", OTHER),
    "load, another layout, torch_checkpointing": ("load: torch_checkp., resharded", OTHER),
}
_BESIDE = {
    "ours": ("ours, waiting", OURS_LIGHT),
    "ours, beside": ("ours, beside", OURS),
    "DCP": ("DCP, waiting", DCP),
    "DCP, thread": ("DCP, thread", DCP),
    "DCP, process": ("DCP, process", DCP),
    "torch_checkpointing": ("torch_checkp., waiting", OTHER),
    "torch_checkpointing, process": ("torch_checkp., process", OTHER),
}
_PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
_GAP = 0.5  # between saves and loads
_LITTLE = 0.4
_COLUMNS, _WIDTH, _ROW, _ROOM = 3, 10.0, 0.2, 0.75  # inches, but for the first


def disk(found: Found, path: Path) -> None:
    """Saves and loads, as shares of the faster raw rate; of many small tensors, little, on its own scale."""
    most = max(share for one in found.values() for share in one["of raw"].values())

    def panel(axes: Axes, one: Mapping[str, Any]) -> None:
        kinds = [kind for kind in _DISK if kind in one["of raw"]]
        places = [place + (_GAP if kind.startswith("load") else 0) for place, kind in enumerate(kinds)]
        shares = [one["of raw"][kind] for kind in kinds]
        end = max(most, 1) if max(shares) > _LITTLE else max(shares)
        if end >= 1:
            axes.axvline(1, color="#303030", linewidth=0.8)
        axes.barh(places, shares, 0.74, color=[_DISK[kind][1] for kind in kinds])
        for place, share in zip(places, shares, strict=True):
            _say(axes, share, place, f"{share:.0%}" if share >= 0.1 else f"{share:.1%}")
        axes.set_xlim(0, 1.25 * end)
        axes.xaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        _name(axes, places, [_DISK[kind][0] for kind in kinds])

    title = "Saves and loads of the slowest rank, of what raw writes and reads reach (longer is better)"
    _draw(found, path, title, panel)


def beside(found: Found, path: Path) -> None:
    """What training waits for a save, logarithmic, beside one copy in memory."""
    stalls = [one["seconds"][f"{kind}: stall"] for one in found.values() for kind in _kinds(one)]
    copies = [one["seconds"]["memcpy"] for one in found.values()]
    low, high = min(*stalls, *copies) / 2, max(stalls) * 6

    def panel(axes: Axes, one: Mapping[str, Any]) -> None:
        kinds, seconds = _kinds(one), one["seconds"]
        for place, kind in enumerate(kinds):
            stall, colour = seconds[f"{kind}: stall"], _BESIDE[kind][1]
            axes.hlines(place, low, stall, color=colour, linewidth=1.6)
            axes.plot([stall], [place], "o", color=colour, markersize=6)
            _say(axes, stall, place, _short(stall))
        axes.axvline(seconds["memcpy"], color="#303030", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        axes.xaxis.set_major_locator(LogLocator(10))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} s")
        _name(axes, range(len(kinds)), [_BESIDE[kind][0] for kind in kinds])

    title = "What training waits for a save (logarithmic; less is better); dashed: one copy in memory"
    _draw(found, path, title, panel)


def _kinds(one: Mapping[str, Any]) -> list[str]:
    return [kind for kind in _BESIDE if f"{kind}: stall" in one["seconds"]]


def _draw(found: Found, path: Path, title: str, panel: Callable[[Axes, Mapping[str, Any]], None]) -> None:
    """Write the PNG."""
    columns = min(_COLUMNS, len(found))
    rows = -(-len(found) // columns)
    figure = Figure(dpi=180, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axes, (model, one) in zip(grid.flat, found.items(), strict=False):
        panel(axes, one)
        axes.set_title(model, fontsize=10, loc="left")
    for axes in list(grid.flat)[len(found) :]:
        axes.set_visible(False)
    lines = max(len(axes.get_yticks()) for axes in grid.flat)
    figure.set_size_inches(_WIDTH, rows * (lines * _ROW + _ROOM) + 0.4)
    figure.suptitle(title, fontsize=10.5, x=0.01, ha="left")
    figure.savefig(path)


def _name(axes: Axes, places: Sequence[float], labels: Sequence[str]) -> None:
    """Rows from top to bottom, each with its name."""
    axes.set_yticks(places, labels, fontsize=9)
    axes.set_ylim(places[-1] + 0.6, places[0] - 0.6)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8.5, labelbottom=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)


def _say(axes: Axes, value: float, place: float, text: str) -> None:
    """Behind the end of a row."""
    axes.annotate(text, (value, place), (5, 0), textcoords="offset points", va="center", fontsize=8.5, bbox=_PAPER)


def _short(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
