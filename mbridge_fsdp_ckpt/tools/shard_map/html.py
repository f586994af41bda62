# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The shard map as one HTML file: SVG with tooltips, and tables; it links to nothing."""

from __future__ import annotations

from collections.abc import Iterable

from rich.filesize import decimal

from mbridge_fsdp_ckpt.tools.balance import NAMED_RANKS
from mbridge_fsdp_ckpt.tools.drawing import elided, render
from mbridge_fsdp_ckpt.tools.shard_map.blocks import Bar, ShardMap, colours, describe
from mbridge_fsdp_ckpt.tools.survey import Survey

_NAMES, _BARS, _SHAPES, _ROW = 520, 640, 260, 22  # pixels


def draw_html(found: Survey, shown: ShardMap) -> str:
    """The page."""
    bars = shown.bars()
    return render(
        "shard_map/page.html",
        {
            "describe": describe,
            "elided": elided,
            "tooltip": _tooltip,
            "holders": _holders,
            "size": decimal,
            "pixels": "{:.2f}".format,
        },
        directory=found.directory,
        facts=_facts(found),
        shares=found.balance,
        palette=colours(found.ranks),
        pattern=shown.pattern,
        notes=[note for note in (shown.left_out(), _merged_note(bars)) if note],
        bars=bars,
        width=_NAMES + _BARS + _SHAPES,
        height=len(bars) * _ROW,
        place={"names": _NAMES, "bars": _BARS, "row": _ROW, "thick": _ROW - 5},
    )


def _merged_note(bars: Iterable[Bar]) -> str:
    if not any(bar.merged for bar in bars):
        return ""
    return "Neighbouring blocks are drawn as one where a bar has very many; the colour is the first rank's."


def _facts(found: Survey) -> list[tuple[str, str]]:
    return [
        ("format", f"{found.format} {'.'.join(map(str, found.version))}".strip()),
        ("written by", ", ".join(f"{name} {version}" for name, version in found.writer.items())),
        ("topology", ", ".join(f"{name}={size}" for name, size in found.topology.items())),
        *((section, decimal(found.section_bytes(section))) for section in found.sections),
        ("keys", str(len(found.keys))),
    ]


def _tooltip(bar: Bar) -> list[str]:
    """A line for each block, as many as a tooltip can show."""
    rest = len(bar.blocks) - NAMED_RANKS
    return [*(block.text for block in bar.blocks[:NAMED_RANKS]), *([f"and {rest} more"] if rest > 0 else [])]


def _holders(bar: Bar) -> str:
    ranks = sorted({rank for block in bar.blocks for rank in (block.first_rank, block.last_rank)})
    names = [str(rank) if rank >= 0 else "unknown" for rank in ranks]
    return ", ".join(names) if len(names) <= NAMED_RANKS else f"{len(names)} or more, {names[0]} to {names[-1]}"
