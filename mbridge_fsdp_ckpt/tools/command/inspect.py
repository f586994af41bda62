# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`inspect`: what a checkpoint holds, who wrote it, and how its shards lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mbridge_fsdp_ckpt.format.names import FORMAT_NAME, STOCK_FORMAT
from mbridge_fsdp_ckpt.tools.command.console import (
    EXIT_CODES,
    AsJson,
    Checkpoint,
    app,
    print_facts,
    print_json,
    print_table,
    say,
    size_text,
)
from mbridge_fsdp_ckpt.tools.command.places import checkpoint_at, draw_to

if TYPE_CHECKING:
    from mbridge_fsdp_ckpt.tools.shard_map.blocks import ShardMap
    from mbridge_fsdp_ckpt.tools.survey import Survey

_MODEL_KEYS = "model.*"
_NOT_OURS = {STOCK_FORMAT: " (stock: no checksums)"}
_OTHER = " (not loaded by this package; no checksums)"


@app.command(epilog=EXIT_CODES)
def inspect(
    checkpoint: Checkpoint,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Draw a map of the shards, as a page.")] = None,
    key: Annotated[
        str | None, typer.Option(metavar="PATTERN", help=f"List keys like this, and draw them (default {_MODEL_KEYS}).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint holds: format, topology, sizes, families, and how the ranks share it."""
    from mbridge_fsdp_ckpt.io.files import hold
    from mbridge_fsdp_ckpt.tools.shard_map.blocks import ShardMap
    from mbridge_fsdp_ckpt.tools.survey import survey, visit_chunks

    directory = hold(checkpoint_at(checkpoint))
    found = survey(directory)
    shown = ShardMap.of(found, key or _MODEL_KEYS)
    visit_chunks(directory, found, shown.visit)
    listed = shown if key is not None else None
    written = _draw(found, shown, html)
    if as_json:
        print_json(_as_data(found, listed, written))
        return
    _show(found, listed)
    for path in written:
        say(f"Wrote {path}")


def _draw(found: Survey, shown: ShardMap, html: str | None) -> list[str]:
    from mbridge_fsdp_ckpt.tools.shard_map.html import draw_html

    return draw_to(html, lambda: draw_html(found, shown))


def _as_data(found: Survey, listed: ShardMap | None, written: list[str]) -> dict[str, Any]:
    shares = {rank: {"bytes": s.bytes, "chunks": s.chunks, "files": s.files} for rank, s in found.ranks.items()}
    data: dict[str, Any] = {
        "checkpoint": found.directory,
        "format": found.format,
        "version": list(found.version),
        "writer": found.writer,
        "topology": found.topology,
        "sections": {
            section: {"keys": found.section_keys(section), "bytes": found.section_bytes(section)}
            for section in found.sections
        },
        "keys": len(found.keys),
        "families": found.families,
        "stock_view": found.stock_view,
        "ranks": shares,
        "max_over_mean": round(found.balance.ratio, 4),
        "written": written,
    }
    if listed is not None:
        data["matching"] = {
            bar.key: {
                "dtype": bar.entry.dtype,
                "shape": list(bar.entry.shape),
                "bytes": bar.entry.nbytes,
                "family": bar.entry.family,
                "blocks": [block.text for block in bar.blocks],
            }
            for bar in listed.bars()
        }
        data["left_out"] = listed.matching - len(listed.selected)
    return data


def _show(found: Survey, listed: ShardMap | None) -> None:
    say(found.directory, style="bold")
    version, is_stock = ".".join(map(str, found.version)), found.format != FORMAT_NAME
    facts = [
        ("format", f"{found.format} {version}".strip() + (_NOT_OURS.get(found.format, _OTHER) if is_stock else "")),
        ("written by", ", ".join(f"{name} {version}" for name, version in found.writer.items())),
        ("topology", ", ".join(f"{name}={size}" for name, size in found.topology.items())),
        ("families", ", ".join(f"{name} ({count} keys)" for name, count in found.families.items()) or "none"),
        ("DCP metadata", "" if is_stock else "yes" if found.stock_view else "no"),
    ]
    print_facts([fact for fact in facts if fact[1]])
    say()
    sections = [(s, str(found.section_keys(s)), size_text(found.section_bytes(s))) for s in found.sections]
    total = ("total", str(len(found.keys)), size_text(sum(entry.nbytes for entry in found.keys.values())))
    print_table(("section", "keys", "bytes"), [*sections, total], right=("keys", "bytes"))
    say()
    shares = found.balance
    rows = [(name, size_text(s.bytes), str(s.chunks), str(s.files)) for name, _, s in shares.rows]
    print_table(("rank", "bytes", "chunks", "files"), rows, right=("bytes", "chunks", "files"))
    for line in shares.summary:
        say(line)
    if is_stock:
        say("Ranks are those of the file names: stock records no others.")
    if listed is not None:
        _show_keys(listed)


def _show_keys(listed: ShardMap) -> None:
    say()
    if not listed.matching:
        say(f"No key matches {listed.pattern}.")
    for bar in listed.bars():
        family = f"  {bar.entry.family}" if bar.entry.family else ""
        shape = ", ".join(map(str, bar.entry.shape))
        say(bar.key, style="bold")
        say(f"  {bar.entry.dtype} [{shape}]  {size_text(bar.entry.nbytes)}{family}")
        for block in bar.blocks:
            say(f"    {block.text}")
    if listed.left_out():
        say(listed.left_out())
