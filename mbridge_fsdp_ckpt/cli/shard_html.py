"""The shard map as one HTML file: SVG with tooltips, and tables; it links to nothing."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping

from mbridge_fsdp_ckpt.care.balance import NAMED_RANKS, Balance, balance
from mbridge_fsdp_ckpt.care.survey import Survey, key_bytes
from mbridge_fsdp_ckpt.cli.console import size_text
from mbridge_fsdp_ckpt.cli.shard_map import Bar, ShardMap, colours, describe, elided
from mbridge_fsdp_ckpt.printable import printable

_NAMES, _BARS, _SHAPES, _ROW = 520, 640, 260, 22  # pixels
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #222; margin: 2em auto; max-width: 1440px; padding: 0 1em; }
h1 { font-size: 1.25em; overflow-wrap: anywhere; } h2 { font-size: 1.05em; margin-top: 2em; }
.map { overflow-x: auto; } svg { display: block; }
svg .key { font: 12px ui-monospace, monospace; } svg .shape { font: 12px system-ui, sans-serif; fill: #666; }
svg rect.block { stroke: #fff; stroke-width: .5; } svg rect.block:hover { stroke: #000; stroke-width: 2; }
table { border-collapse: collapse; } th, td { padding: .2em .9em .2em 0; text-align: left; vertical-align: top; }
th { border-bottom: 1px solid #999; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
td.key { font-family: ui-monospace, monospace; overflow-wrap: anywhere; }
.swatch { display: inline-block; width: .9em; height: .9em; margin-right: .4em; vertical-align: -.1em; }
.note { color: #666; }
"""


def draw_html(found: Survey, shown: ShardMap) -> str:
    """The page."""
    bars, palette = shown.bars(), colours(found.ranks)
    notes = [note for note in (shown.left_out(), _merged_note(bars)) if note]
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Shards of {escape(found.directory)}</title>",
        f"<style>{_STYLE}</style></head>",
        "<body>",
        f"<h1>{escape(found.directory)}</h1>",
        _facts(found),
        "<h2>Ranks</h2>",
        _ranks(balance(found.ranks), palette),
        f"<h2>Blocks of keys that match <code>{escape(shown.pattern)}</code></h2>",
        '<p class="note">Rows run from left to right, columns from top to bottom; the colour says the rank.'
        " Point at a block to see it in words.</p>",
        *(f'<p class="note">{escape(note)}</p>' for note in notes),
        f'<div class="map">{_svg(bars, palette)}</div>' if bars else "<p>No key matches.</p>",
        "<h2>Keys</h2>",
        _keys(bars),
        "</body>",
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def _merged_note(bars: Iterable[Bar]) -> str:
    merged = any(bar.merged for bar in bars)
    return "Neighbouring blocks are drawn as one where a bar has very many; the colour is the first rank's." * merged


def _facts(found: Survey) -> str:
    rows = [
        ("format", f"{found.format} {'.'.join(map(str, found.version))}".strip()),
        ("written by", ", ".join(f"{name} {version}" for name, version in found.writer.items())),
        ("topology", ", ".join(f"{name}={size}" for name, size in found.topology.items())),
        *((section, size_text(found.section_bytes(section))) for section in found.sections),
        ("keys", str(len(found.keys))),
    ]
    return _table((), [(f"<th>{escape(name)}</th>", f"<td>{escape(text)}</td>") for name, text in rows if text])


def _ranks(shares: Balance, palette: Mapping[int, str]) -> str:
    rows = [
        (
            f'<td><span class="swatch" style="background:{palette[rank]}"></span>{name}</td>',
            f'<td class="n">{size_text(share.bytes)}</td>',
            f'<td class="n">{share.chunks}</td>',
            f'<td class="n">{share.files}</td>',
        )
        for name, rank, share in shares.rows
    ]
    summary = "".join(f'<p class="note">{escape(line)}</p>' for line in shares.summary)
    return _table(("rank", "bytes", "chunks", "files"), rows) + summary


def _svg(bars: list[Bar], palette: Mapping[int, str]) -> str:
    width, height = _NAMES + _BARS + _SHAPES, len(bars) * _ROW
    rows = "\n".join(_svg_row(row * _ROW, bar, palette) for row, bar in enumerate(bars))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'{head} role="img" aria-label="Blocks of each key, coloured by rank">\n{rows}\n</svg>'


def _svg_row(y: int, bar: Bar, palette: Mapping[int, str]) -> str:
    thick = _ROW - 5
    label = f"<title>{escape(bar.key)}</title>{escape(elided(bar.key, 70))}"
    parts = [
        f'<text class="key" x="{_NAMES - 10}" y="{y + _ROW - 8}" text-anchor="end">{label}</text>',
        f'<rect x="{_NAMES}" y="{y + 2}" width="{_BARS}" height="{thick}" fill="#eee"/>',
    ]
    for block in bar.blocks:
        x, top = _NAMES + block.left * _BARS, y + 2 + block.top * thick
        size = f'width="{block.width * _BARS:.2f}" height="{block.height * thick:.2f}"'
        parts.append(
            f'<rect class="block" x="{x:.2f}" y="{top:.2f}" {size} fill="{palette[block.first_rank]}">'
            f"<title>{escape(bar.key)}\n{escape(block.text)}</title></rect>"
        )
    shape = elided(describe(bar.entry), 40)
    parts.append(f'<text class="shape" x="{_NAMES + _BARS + 10}" y="{y + _ROW - 8}">{escape(shape)}</text>')
    return "".join(parts)


def _keys(bars: list[Bar]) -> str:
    rows = [
        (
            f'<td class="key" title="{_tooltip(bar)}">{escape(bar.key)}</td>',
            f"<td>{escape(describe(bar.entry))}</td>",
            f'<td class="n">{size_text(key_bytes(bar.entry))}</td>',
            f"<td>{escape(bar.entry.family or '')}</td>",
            f"<td>{escape(_holders(bar))}</td>",
        )
        for bar in bars
    ]
    return _table(("key", "shape", "bytes", "family", "ranks"), rows)


def _tooltip(bar: Bar) -> str:
    shown = [escape(block.text) for block in bar.blocks[:NAMED_RANKS]]
    return "\n".join([*shown, f"and {len(bar.blocks) - NAMED_RANKS} more"] if len(bar.blocks) > NAMED_RANKS else shown)


def _holders(bar: Bar) -> str:
    ranks = sorted({rank for block in bar.blocks for rank in (block.first_rank, block.last_rank)})
    names = [str(rank) if rank >= 0 else "unknown" for rank in ranks]
    return ", ".join(names) if len(names) <= NAMED_RANKS else f"{len(names)} or more, {names[0]} to {names[-1]}"


def _table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    head = "".join(
        f'<th class="{"n" if name in ("bytes", "chunks", "files") else "t"}">{name}</th>' for name in headings
    )
    top = f"<thead><tr>{head}</tr></thead>" if headings else ""
    return f"<table>{top}<tbody>{''.join(f'<tr>{"".join(row)}</tr>' for row in rows)}</tbody></table>"


def escape(text: str) -> str:
    """Text as HTML shows it, in an attribute, too."""
    return html.escape(printable(text))
