# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`verify`: is every byte of a checkpoint what was written?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mbridge_fsdp_ckpt.io.progress_bar import progress_bar
from mbridge_fsdp_ckpt.tools.command.console import EXIT_CODES, AsJson, Checkpoint, app, print_json, say, size_text
from mbridge_fsdp_ckpt.tools.command.places import checkpoint_at

if TYPE_CHECKING:
    from mbridge_fsdp_ckpt.tools.findings import Finding
    from mbridge_fsdp_ckpt.tools.verify import Report


@app.command(epilog=EXIT_CODES)
def verify(
    checkpoint: Checkpoint,
    header: Annotated[
        bool, typer.Option("--header", help="Check structure and sizes only: payload is not read.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Files that are read at a time.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Check a checkpoint's structure and every byte of it, and name all that is damaged."""
    from mbridge_fsdp_ckpt.tools import verify as checking

    directory = checkpoint_at(checkpoint)

    with progress_bar() as bar:
        report = checking.verify(directory, header=header, workers=workers, progress=bar)
    if as_json:
        print_json(_as_data(report))
    else:
        _show(report)
    if report.damage:
        raise typer.Exit(1)


def _as_data(report: Report) -> dict[str, Any]:
    return {
        "checkpoint": report.directory,
        "format": report.format,
        "intact": not report.damage,
        "checked": report.checked,
        "notes": report.notes,
        "findings": [_finding_data(finding) for finding in report.damage],
    }


def _finding_data(finding: Finding) -> dict[str, Any]:
    box = finding.box
    return {
        "subject": finding.subject,
        "file": finding.file,
        "key": finding.key,
        "box": {"offset": list(box.offset), "size": list(box.size)} if box is not None else None,
        "bytes": list(finding.span) if finding.span is not None else None,
        "expected": finding.expected,
        "found": finding.found,
    }


def _show(report: Report) -> None:
    say(f"{report.directory}  ({report.format})")
    for finding in report.damage:
        say(f"DAMAGED {finding.subject} {finding.file}", style="red")
        if finding.key is not None:
            say(f"  key       {finding.key}")
        if finding.box is not None:
            say(f"  block     offset {list(finding.box.offset)}, size {list(finding.box.size)}")
        if finding.span is not None:
            say(f"  bytes     [{finding.span[0]}, {finding.span[1]})")
        say(f"  expected  {finding.expected}")
        say(f"  found     {finding.found}")
    counted = [f"{count} {what}" for what, count in report.checked.items() if what != "bytes"]
    if "bytes" in report.checked:
        counted.append(f"{size_text(report.checked['bytes'])} read")
    if counted:
        say(f"Checked: {', '.join(counted)}.")
    for note in report.notes:
        say(f"Note: {note}.")
    if report.damage:
        say(f"{len(report.damage)} damaged.", style="bold red")
    else:
        say("No damage found." if report.notes else "Intact.", style="bold green")
