# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The results as a picture: seconds and collectives, both formats beside each other, logarithmic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from benchmarks.costs import Cost
from benchmarks.summary import Contest, seconds

_COLOURS = {"stock": "#b8b8b8", "safe": "#2f7fc1"}
_NAMES = {"stock": "stock fsdp_dtensor", "safe": "fsdp_dtensor_safe"}
_WIDTH = 0.4


def draw(lines: Sequence[Contest], title: str, path: Path) -> None:
    """Write the PNG."""
    matplotlib.use("Agg")
    figure = Figure(figsize=(12, 4.8), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_seconds(left, lines)
    _draw_collectives(right, lines)
    for axes in (left, right):
        _finish(axes, lines)
    figure.suptitle(title, fontsize=11)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path)


def _draw_seconds(axes: Axes, lines: Sequence[Contest]) -> None:
    for side, name in enumerate(_COLOURS):
        spreads = [seconds(_costs(line, name)) for line in lines]
        tops = [spread.median for spread in spreads]
        errors = [
            [spread.median - spread.least for spread in spreads],
            [spread.most - spread.median for spread in spreads],
        ]
        places = _places(lines, side)
        axes.bar(places, tops, _WIDTH, color=_COLOURS[name], label=_NAMES[name])
        axes.errorbar(places, tops, yerr=errors, fmt="none", ecolor="#404040", elinewidth=0.8, capsize=2)
        for place, spread in zip(places, spreads, strict=True):
            _write(axes, place, spread.most, _short(spread.median))
    axes.set_yscale("log")
    axes.set_ylabel("seconds of the slowest rank")
    axes.set_title("Time: median, with least and most", fontsize=10)
    low, high = axes.get_ylim()
    axes.set_ylim(low / 2, high * 2)
    axes.yaxis.set_minor_locator(NullLocator())


def _draw_collectives(axes: Axes, lines: Sequence[Contest]) -> None:
    for side, name in enumerate(_COLOURS):
        tops = [max(cost.collectives for cost in _costs(line, name)) for line in lines]
        places = _places(lines, side)
        axes.bar(places, tops, _WIDTH, color=_COLOURS[name], label=_NAMES[name])
        for place, top in zip(places, tops, strict=True):
            _write(axes, place, top, f"{top:,}")
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(0, axes.get_ylim()[1] * 3)
    axes.set_ylabel("collectives of one rank")
    axes.set_title("Collectives, barriers included", fontsize=10)


def _finish(axes: Axes, lines: Sequence[Contest]) -> None:
    axes.set_xticks(range(len(lines)), [line.title.replace(", ", "\n") for line in lines])
    axes.tick_params(axis="x", length=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", which="major", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)


def _costs(line: Contest, name: str) -> list[Cost]:
    return line.stock if name == "stock" else line.safe


def _places(lines: Sequence[Contest], side: int) -> list[float]:
    return [index + (side - 0.5) * _WIDTH for index in range(len(lines))]


def _write(axes: Axes, place: float, height: float, text: str) -> None:
    axes.annotate(text, (place, height), (0, 3), textcoords="offset points", ha="center", fontsize=7.5)


def _short(value: float) -> str:
    return f"{value:#.3g}" if value < 100 else f"{value:.0f}"
