# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`repair`: tidies up after saves that died, and makes DCP metadata where it is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mbridge_fsdp_ckpt.tools.command.console import EXIT_CODES, AsJson, DryRun, Yes, app, confirm, print_json, say
from mbridge_fsdp_ckpt.tools.command.places import checkpoint_at, root_at

if TYPE_CHECKING:
    from mbridge_fsdp_ckpt.io.store import AnyPath
    from mbridge_fsdp_ckpt.tools.repair import Plan, Step


@app.command(epilog=EXIT_CODES)
def repair(
    root: Annotated[
        str,
        typer.Argument(help="The root of a run's checkpoints; with --stock-view, also an iteration directory."),
    ],
    stock_view: Annotated[
        bool, typer.Option("--stock-view", help="Only add .metadata to a checkpoint, so that stock can read it.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also delete leftovers younger than an hour. Only while no save runs.")
    ] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Move back checkpoints that dead saves put aside, rebuild the tracker, delete leftovers.

    A committed checkpoint is never deleted, and a tracker that names a complete one is left alone.
    """
    from mbridge_fsdp_ckpt.tools.dcp_metadata import plan_view
    from mbridge_fsdp_ckpt.tools.repair import plan_repair

    if stock_view:
        directory = checkpoint_at(root)
        plan = plan_view(directory)
    else:
        directory = root_at(root)
        plan = plan_repair(directory, force=force)
    if not as_json:
        _show(directory, plan)
    taken: list[Step] = []
    if not dry_run:
        doomed = len(plan.deletes)
        if doomed:
            confirm(f"Delete {doomed} leftover{'s' if doomed > 1 else ''}?", yes=yes)
        taken = plan.carry_out()
    if as_json:
        print_json(_as_data(directory, plan, taken, dry_run))
    else:
        _conclude(plan, taken, dry_run)
    if plan.broken:
        raise typer.Exit(1)


def _as_data(directory: AnyPath, plan: Plan, taken: list[Step], dry_run: bool) -> dict[str, Any]:
    return {
        "root": str(directory),
        "dry_run": dry_run,
        "steps": [
            {"action": step.action, "path": str(step.path), "why": step.why, "done": step in taken}
            for step in plan.steps
        ],
        "left_alone": [{"path": str(path), "why": why} for path, why in plan.left_alone],
        "broken": [{"path": str(path), "why": why} for path, why in plan.broken],
    }


def _show(directory: AnyPath, plan: Plan) -> None:
    say(str(directory), style="bold")
    for step in plan.steps:
        say(f"  {step.action:<10} {step.path.name}  ({step.why})")
    for path, why in plan.left_alone:
        say(f"  left alone {path.name}  ({why})")
    for path, why in plan.broken:
        say(f"  BROKEN     {path.name}  ({why})", style="red")


def _conclude(plan: Plan, taken: list[Step], dry_run: bool) -> None:
    if not plan.steps:
        say("Nothing to do.")
    elif dry_run:
        say(f"{len(plan.steps)} to do; nothing was changed (--dry-run).")
    else:
        say(f"{len(taken)} done.")
