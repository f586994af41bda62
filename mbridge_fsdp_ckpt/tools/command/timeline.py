# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`timeline`: who took how long in the save of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mbridge_fsdp_ckpt.tools.command.console import (
    EXIT_CODES,
    AsJson,
    Checkpoint,
    app,
    print_facts,
    print_json,
    print_table,
    say,
)
from mbridge_fsdp_ckpt.tools.command.places import checkpoint_at, draw_to

if TYPE_CHECKING:
    from mbridge_fsdp_ckpt.tools.timeline.lanes import Timeline

_NAMED = 20  # stragglers


@app.command(epilog=EXIT_CODES)
def timeline(
    checkpoint: Checkpoint,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Draw ranks and phases, as a page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how long each rank's part of a save took, phase by phase, and who kept the others waiting."""
    from mbridge_fsdp_ckpt.io.files import hold
    from mbridge_fsdp_ckpt.tools.timeline import lanes

    found = lanes.timeline(hold(checkpoint_at(checkpoint)))
    written = _draw(found, html)
    if as_json:
        print_json(_as_data(found, written))
        return
    _show(found)
    for path in written:
        say(f"Wrote {path}")


def _draw(found: Timeline, html: str | None) -> list[str]:
    from mbridge_fsdp_ckpt.tools.timeline.html import draw_html

    return draw_to(html, lambda: draw_html(found))


def _as_data(found: Timeline, written: list[str]) -> dict[str, Any]:
    return {
        "checkpoint": found.directory,
        "commit": found.commit,
        "medians": dict(found.medians),
        "stragglers": [
            {"rank": one.rank, "phase": one.phase, "seconds": one.seconds, "median": one.usual}
            for one in found.stragglers
        ],
        "ranks": {
            lane.rank: {
                "begun": lane.begun,
                "start": lane.start,
                "phases": [{"name": p.name, "begin": p.begin, "seconds": p.seconds} for p in lane.phases],
            }
            for lane in found.lanes
        },
        "written": written,
    }


def _show(found: Timeline) -> None:
    from mbridge_fsdp_ckpt.tools.timeline.facts import cells, facts, left_out, phase_rows
    from mbridge_fsdp_ckpt.tools.timeline.lanes import RULE

    say(found.directory, style="bold")
    print_facts(facts(found))
    say()
    headings = ("phase", "median s", "slowest s", "rank", "stragglers")
    print_table(headings, phase_rows(found), right=headings[1:])
    say()
    names = [*found.medians, "own"]
    rows = [
        (str(lane.rank), *(text + ("*" if slow else "") for text, slow in cells(found, lane)), f"{lane.own:.3f}")
        for lane in found.slowest
    ]
    print_table(("rank", *names), rows, right=names)
    if left_out(found):
        say(left_out(found))
    for one in found.stragglers[:_NAMED]:
        say(f"* {one.said}", style="red")
    if len(found.stragglers) > _NAMED:
        say(f"and {len(found.stragglers) - _NAMED} more")
    say(RULE)
