# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A card to draw on, in pixels from the top left: light, with an edge, so that it reads on light and on dark pages."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

TEXT, FAINT, EDGE = "#1f2328", "#57606a", "#d0d7de"
BLUE, YELLOW, GREEN, GREY = (
    ("#ddf4ff", "#54aeff"),
    ("#fff3c4", "#d4a72c"),
    ("#dafbe1", "#4ac26b"),
    ("#eaeef2", "#8c959f"),
)
SMALL, NORMAL = 10.2, 11.4  # points; a page shows 860 pixels on some 700, where 10.2 points are 11 pixels

_DOTS = 96  # CSS pixels an inch


class Canvas:
    """A picture in the making.

    Args:
        width: Pixels.
        height: Pixels.
    """

    def __init__(self, width: int, height: int) -> None:
        self.figure = Figure(figsize=(width / _DOTS, height / _DOTS), dpi=_DOTS)
        self.axes: Axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, width), ylim=(height, 0))
        self.axes.axis("off")
        self._patch(1, 1, width - 2, height - 2, ("#ffffff", EDGE), 10)

    def _patch(self, x: float, y: float, width: float, height: float, colours: tuple[str, str], radius: float) -> None:
        style = f"round,pad=0,rounding_size={radius}"
        face, edge = colours
        patch = FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=face, edgecolor=edge, linewidth=1)
        self.axes.add_patch(patch)

    def box(self, x: float, y: float, width: float, height: float, text: str, colours: tuple[str, str] = BLUE) -> None:
        """A box with a text in its middle, its first line strong."""
        self._patch(x, y, width, height, colours, 5)
        lines = text.split("\n")
        top = y + height / 2 - (len(lines) - 1) * 9
        for number, line in enumerate(lines):
            strong = number == 0 and len(lines) > 1
            self.text(x + width / 2, top + 18 * number, line, strong=strong, across="center")

    def bar(self, x: float, y: float, width: float, height: float, text: str) -> None:
        """An upright box, its text from bottom to top: where all ranks wait for each other."""
        self._patch(x, y, width, height, YELLOW, 5)
        style: dict[str, Any] = {"ha": "center", "va": "center", "rotation": 90, "linespacing": 1.35}
        self.axes.text(x + width / 2, y + height / 2, text, fontsize=SMALL, color=TEXT, **style)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = SMALL,
        strong: bool = False,
        across: str = "left",
        colour: str = TEXT,
    ) -> None:
        """A line of text, its middle at y."""
        style: dict[str, Any] = {"ha": across, "va": "center_baseline", "weight": "bold" if strong else "normal"}
        self.axes.text(x, y, text, fontsize=size, color=colour, **style)

    def arrow(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """An arrow between two places."""
        style = {"arrowstyle": "-|>", "color": FAINT, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
        self.axes.annotate("", end, start, arrowprops=style)

    def shards(self, x: float, y: float, parts: Sequence[int], held: int) -> None:
        """A tensor as a row of parts, one of them held here."""
        for number, width in enumerate(parts):
            colours = (BLUE[1], BLUE[1]) if number == held else ("#ffffff", GREY[1])
            self._patch(x + sum(parts[:number]) + 3 * number, y, width, 9, colours, 1)

    def svg(self) -> bytes:
        """The file: the same bytes whenever it is drawn."""
        with mpl.rc_context({"svg.hashsalt": "mbridge_fsdp_ckpt", "svg.fonttype": "path"}):
            file = io.BytesIO()
            self.figure.savefig(file, format="svg", metadata={"Date": None}, transparent=True)
        return b"\n".join(line.rstrip() for line in file.getvalue().splitlines()) + b"\n"
