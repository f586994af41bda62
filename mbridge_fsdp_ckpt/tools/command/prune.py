# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`prune`: removes old checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mbridge_fsdp_ckpt.tools.command.console import (
    EXIT_CODES,
    AsJson,
    DryRun,
    Root,
    Yes,
    app,
    confirm,
    print_json,
    say,
    size_text,
)
from mbridge_fsdp_ckpt.tools.command.places import root_at

if TYPE_CHECKING:
    from mbridge_fsdp_ckpt.commit.retention import Iteration
    from mbridge_fsdp_ckpt.tools.prune import Pruning


@app.command(epilog=EXIT_CODES)
def prune(
    root: Root,
    keep: Annotated[int, typer.Option(min=1, help="How many of the newest complete checkpoints stay.")],
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove all but the newest complete checkpoints.

    What the tracker names, what is being read, and incomplete directories stay.
    """
    from mbridge_fsdp_ckpt.tools.prune import plan_pruning

    plan = plan_pruning(root_at(root), keep)
    if not as_json:
        _show(plan)
    removed: dict[Iteration, int] = {}
    if plan.doomed and not dry_run:
        confirm(f"Remove {_count(len(plan.doomed))} ({size_text(plan.size)})?", yes=yes)
        removed = plan.carry_out()
    if as_json:
        print_json(_as_data(plan, removed, dry_run))
    elif dry_run:
        say(f"Would free {size_text(plan.size)}.")
    else:
        say(f"Freed {size_text(sum(removed.values()))}.")


def _count(number: int) -> str:
    return f"{number} checkpoint" + ("" if number == 1 else "s")


def _as_data(plan: Pruning, removed: dict[Iteration, int], dry_run: bool) -> dict[str, Any]:
    return {
        "root": str(plan.root),
        "dry_run": dry_run,
        "prunable": {iteration.directory.name: size for iteration, size in plan.doomed.items()},
        "removed": [iteration.directory.name for iteration in removed],
        "freed_bytes": sum(removed.values()),
        "kept": plan.kept,
    }


def _show(plan: Pruning) -> None:
    say(str(plan.root), style="bold")
    for iteration, size in plan.doomed.items():
        say(f"  remove  {iteration.directory.name}  {size_text(size)}")
    for name, reason in plan.kept.items():
        say(f"  keep    {name}  {reason}")
    if not plan.doomed:
        say("Nothing to remove.")
