"""`prune`: removes old checkpoints."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mbridge_fsdp_ckpt.care.root import bytes_in, open_root
from mbridge_fsdp_ckpt.cli.console import EXIT_CODES, DryRun, Json, Root, Yes, app, confirm, print_json, say, size_text
from mbridge_fsdp_ckpt.errors import NotACheckpointError
from mbridge_fsdp_ckpt.hosts.root import RELEASE, TRACKER, tracked
from mbridge_fsdp_ckpt.storage.commit.methods import remove
from mbridge_fsdp_ckpt.storage.commit.retention import Iteration, being_read, iterations, prunable
from mbridge_fsdp_ckpt.storage.store import AnyPath


@app.command(epilog=EXIT_CODES)
def prune(
    root: Root,
    keep: Annotated[int, typer.Option(min=1, help="How many of the newest complete checkpoints stay.")],
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove all but the newest complete checkpoints.

    What the tracker names, what is being read, and incomplete directories stay.
    """
    directory = open_root(root)
    named = _named(directory)
    doomed = {iteration: bytes_in(iteration.directory) for iteration in prunable(directory, keep, named)}
    kept = _kept(directory, keep, named, doomed)
    if not as_json:
        _show(directory, doomed, kept)
    removed: dict[Iteration, int] = {}
    if doomed and not dry_run:
        confirm(f"Remove {_count(len(doomed))} ({size_text(sum(doomed.values()))})?", yes=yes)
        removed = _remove(directory, keep, doomed)
    if as_json:
        print_json(_as_data(directory, doomed, removed, kept, dry_run))
    elif dry_run:
        say(f"Would free {size_text(sum(doomed.values()))}.")
    else:
        say(f"Freed {size_text(sum(removed.values()))}.")


def _named(root: AnyPath) -> int | None:
    """The iteration that the tracker names.

    Raises:
        NotACheckpointError: It is not legible: what must stay is not known.
    """
    text = tracked(root)
    if text is None or text == RELEASE:
        return None
    if not (text.isascii() and text.isdecimal()):
        raise NotACheckpointError(
            expected="an iteration number in the tracker file",
            found=repr(text),
            remedy=f"Nothing was removed. Rebuild the tracker first: mbridge_fsdp_ckpt repair {root}",
            key=str(root / TRACKER),
        )
    return int(text)


def _remove(root: AnyPath, keep: int, doomed: dict[Iteration, int]) -> dict[Iteration, int]:
    """Remove what was shown, and is still to go: time has passed since."""
    removed = {}
    for iteration, size in doomed.items():
        if iteration in prunable(root, keep, _named(root)):
            remove(iteration.directory)
            removed[iteration] = size
    return removed


def _kept(root: AnyPath, keep: int, named: int | None, doomed: dict[Iteration, int]) -> dict[str, str]:
    """Why each other directory stays."""
    there = iterations(root)
    newest = [iteration for iteration in there if iteration.complete][-keep:]
    reasons = {}
    for iteration in there:
        if iteration in doomed:
            continue
        if not iteration.complete:
            reason = "incomplete: no head, or being written"
        elif iteration.number == named:
            reason = "the tracker names it"
        elif iteration in newest:
            reason = f"among the newest {keep}"
        else:
            reason = "being read" if being_read(iteration.directory) else "newer than it was"
        reasons[iteration.directory.name] = reason
    return reasons


def _count(number: int) -> str:
    return f"{number} checkpoint" + ("" if number == 1 else "s")


def _as_data(
    root: AnyPath, doomed: dict[Iteration, int], removed: dict[Iteration, int], kept: dict[str, str], dry_run: bool
) -> dict[str, Any]:
    return {
        "root": str(root),
        "dry_run": dry_run,
        "prunable": {iteration.directory.name: size for iteration, size in doomed.items()},
        "removed": [iteration.directory.name for iteration in removed],
        "freed_bytes": sum(removed.values()),
        "kept": kept,
    }


def _show(root: AnyPath, doomed: dict[Iteration, int], kept: dict[str, str]) -> None:
    say(str(root), style="bold")
    for iteration, size in doomed.items():
        say(f"  remove  {iteration.directory.name}  {size_text(size)}")
    for name, reason in kept.items():
        say(f"  keep    {name}  {reason}")
    if not doomed:
        say("Nothing to remove.")
