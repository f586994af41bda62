# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The shard map as a picture: the bytes of each rank above, which give the colours their names; the bars below."""

from __future__ import annotations

from typing import Any

from rich.filesize import decimal

from mbridge_fsdp_ckpt.tools.balance import NAMED_RANKS
from mbridge_fsdp_ckpt.tools.drawing import (
    AS_IT_IS,
    EMPTY,
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
from mbridge_fsdp_ckpt.tools.shard_map.blocks import Bar, ShardMap, colours, describe
from mbridge_fsdp_ckpt.tools.survey import Survey

_WIDTH, _BAR, _BALANCE = 14.0, 0.215, 1.5  # inches
_LEFT, _RIGHT = 0.345, 0.155  # of the width: names, shapes


def draw_png(found: Survey, shown: ShardMap) -> bytes:
    """The picture.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    figure_class = require_matplotlib()
    bars, palette = shown.bars(), colours(found.ranks)
    notes = _notes(found, shown, bars)
    head, foot = 0.95, 0.55 + 0.2 * len(notes)
    map_height = max(3, len(bars)) * _BAR
    height = head + _BALANCE + 0.75 + map_height + foot
    figure = figure_class(figsize=(_WIDTH, height), facecolor="white")
    write_heading(figure, found.directory, _said(found), height)
    top = height - head
    balance = figure.add_axes((_LEFT, (top - _BALANCE) / height, 1 - _LEFT - _RIGHT, _BALANCE / height))
    _draw_balance(balance, found, palette)
    bottom = top - _BALANCE - 0.75 - map_height
    axes = figure.add_axes((_LEFT, bottom / height, 1 - _LEFT - _RIGHT, map_height / height))
    _draw_bars(axes, bars, palette)
    write_notes(figure, notes, bottom, height)
    return content_of(figure)


def _said(found: Survey) -> str:
    sizes = ", ".join(f"{section} {decimal(found.section_bytes(section))}" for section in found.sections)
    version = f" {'.'.join(map(str, found.version))}" if found.version else ""
    return f"{found.format}{version}   ·   {len(found.ranks)} ranks   ·   {len(found.keys)} keys   ·   {sizes}"


def _draw_balance(axes: Any, found: Survey, palette: Any) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    ranks, sizes = list(found.ranks), [share.bytes for share in found.ranks.values()]
    few = len(ranks) <= NAMED_RANKS
    positions = range(len(ranks)) if few else ranks
    axes.bar(positions, sizes, color=[palette[rank] for rank in ranks], width=0.8 if few else 1.0)
    axes.set_title("bytes of each rank", fontsize=10, color=INK, loc="left")
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: decimal(round(value))))
    if few:
        axes.set_xticks(list(positions), [_label(rank, len(ranks)) for rank in ranks])
    axes.margins(x=0.01)
    tidy(axes, keep="left")


def _label(rank: int, count: int) -> str:
    if rank < 0:
        return "?"
    return f"rank {rank}" if count <= 16 else str(rank)


def _draw_bars(axes: Any, bars: list[Bar], palette: Any) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    patches, faces = [], []
    thick = 0.76
    for row, bar in enumerate(bars):
        patches.append(Rectangle((0, row - thick / 2), 1, thick))
        faces.append(EMPTY)
        for block in bar.blocks:
            corner = block.left, row - thick / 2 + block.top * thick
            patches.append(Rectangle(corner, block.width, block.height * thick))
            faces.append(palette[block.first_rank])
    edge = 0.6 if len(patches) < 40 * max(1, len(bars)) else 0.0
    axes.add_collection(PatchCollection(patches, facecolors=faces, edgecolors="white", linewidths=edge))
    axes.set_xlim(0, 1)
    axes.set_ylim(max(3, len(bars)) - 0.5, -0.5)
    names = [elided(bar.key, 68) for bar in bars]
    axes.set_yticks(range(len(bars)), names, fontsize=8, family="monospace", **AS_IT_IS)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["first row", "¼", "½", "¾", "last row"])
    axes.set_title("blocks of each key: rows from left to right, columns from top to bottom", fontsize=10, loc="left")
    for row, bar in enumerate(bars):
        axes.text(1.01, row, elided(describe(bar.entry), 34), fontsize=8, color=FAINT, va="center")
    tidy(axes, keep="")


def _notes(found: Survey, shown: ShardMap, bars: list[Bar]) -> list[str]:
    notes = [shown.left_out()] if shown.left_out() else []
    if any(bar.merged for bar in bars):
        notes.append("Neighbouring blocks are drawn as one where a bar has very many; the colour is the first rank's.")
    if not bars:
        notes.append(f"No key matches {shown.pattern}.")
    if -1 in found.ranks:
        notes.append("Some file names don't tell the rank.")
    return folded(notes)
