# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""An estimate as a picture: the bytes of each rank above, and who writes which part of the model below."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from rich.filesize import decimal

from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.printable import printable
from mbridge_fsdp_ckpt.tools.estimate.counted import Counts
from mbridge_fsdp_ckpt.tools.estimate.estimate import Estimate

_INK, _FAINT = "#222222", "#666666"
_COLOURS = ("#2f7fc1", "#d4a72c", "#4ac26b", "#b45f9c", "#8c959f")
_COLUMNS = 1_200
"""At most so many ranks are drawn one by one; of more, a column is the heaviest of its ranks."""


def require_matplotlib() -> Any:
    """The class `Figure` of matplotlib.

    Raises:
        ConfigurationError: It is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            expected="matplotlib, to draw a picture",
            found=str(error),
            remedy="Install it: pip install 'mbridge-fsdp-ckpt[tools]'. The table needs nothing.",
        ) from error
    return Figure


def draw(found: Estimate, kind: str) -> bytes:
    """The picture.

    Args:
        found: What was found.
        kind: "png" or "svg".

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    figure = require_matplotlib()(figsize=(12, 6.4), facecolor="white", layout="constrained")
    parts = dict(sorted(found.tally.by_part.items(), key=lambda item: -int(item[1].sum())))
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_bytes(upper, found, parts)
    _draw_parts(lower, found.layout.world, parts)
    total = decimal(int(found.tally.bytes.sum()))
    figure.suptitle(printable(f"{found.name}: {total} from {found.layout.said}"), x=0.01, ha="left", parse_math=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=120)
    return buffer.getvalue()


def _draw_bytes(axes: Any, found: Estimate, parts: dict[str, Counts]) -> None:
    from matplotlib.ticker import FuncFormatter

    ranks = _heaviest(found.tally.bytes)
    edges = np.linspace(0, found.layout.world, len(ranks) + 1) - 0.5
    bottom = np.zeros(len(ranks))
    for (part, sizes), colour in zip(parts.items(), _COLOURS, strict=False):
        shown = sizes[ranks]
        axes.stairs(bottom + shown, edges, baseline=bottom, fill=True, color=colour, label=part, linewidth=0)
        bottom = bottom + shown
    mean = float(found.tally.bytes.mean())
    axes.axhline(mean, color=_INK, linewidth=0.8, linestyle=":")
    axes.set_title(f"bytes that each rank writes; dotted the mean, max/mean {found.balance.ratio:.2f}", **_title())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: decimal(round(value))))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, ncols=len(parts), loc="upper left", bbox_to_anchor=(0, -0.02))
    _tidy(axes)


def _draw_parts(axes: Any, world: int, parts: dict[str, Counts]) -> None:
    heaviest = [max(1, int(sizes.max())) for sizes in parts.values()]
    shades = np.array([sizes[_heaviest(sizes)] / most for sizes, most in zip(parts.values(), heaviest, strict=True)])
    axes.imshow(
        shades, aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest",
        extent=(-0.5, world - 0.5, len(parts) - 0.5, -0.5),
    )  # fmt: skip
    names = [f"{part}, up to {decimal(most)}" for part, most in zip(parts, heaviest, strict=True)]
    axes.set_yticks(range(len(parts)), names)
    axes.set_title("who writes which part: nothing is white, what the heaviest rank has of it is dark", **_title())
    axes.set_xlabel("rank", fontsize=9, color=_FAINT)
    _tidy(axes)


def _heaviest(sizes: Counts) -> Counts:
    """The rank that a column shows: the heaviest of those in it."""
    width = -(-len(sizes) // _COLUMNS)
    starts = range(0, len(sizes), width)
    return np.array([start + int(sizes[start : start + width].argmax()) for start in starts])


def _title() -> dict[str, Any]:
    return {"fontsize": 10, "color": _INK, "loc": "left"}


def _tidy(axes: Any) -> None:
    """Axes without a frame."""
    for side in ("left", "right", "top", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, labelcolor=_INK, labelsize=8)
