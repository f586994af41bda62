"""`verify`: is every byte of a checkpoint what was written?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from mbridge_fsdp_ckpt.care.audit import Audit
from mbridge_fsdp_ckpt.care.findings import Finding, stock_findings
from mbridge_fsdp_ckpt.cli.console import EXIT_CODES, Checkpoint, Json, app, print_json, progress_bar, say, size_text
from mbridge_fsdp_ckpt.errors import DamagedCheckpointError, ManifestError
from mbridge_fsdp_ckpt.hosts.root import find_checkpoint
from mbridge_fsdp_ckpt.storage.commit.retention import reading
from mbridge_fsdp_ckpt.storage.format.names import DCP_METADATA, FORMAT_NAME, MANIFEST_NAME, STOCK_FORMAT
from mbridge_fsdp_ckpt.storage.opening import open_checkpoint
from mbridge_fsdp_ckpt.storage.store import AnyPath, as_path

STOCK_NOTE = "stock fsdp_dtensor has no checksums: only structure and file sizes were checked"


@dataclass(slots=True)
class Report:
    """What was looked at, and what could not be."""

    directory: str
    format: str
    checked: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Plan:
    """How to look: without payload, with so many threads, and what to tell on the way."""

    header: bool
    workers: int
    progress: Callable[[int], None]
    begin: Callable[[Audit], None]


@app.command(epilog=EXIT_CODES)
def verify(
    checkpoint: Checkpoint,
    header: Annotated[
        bool, typer.Option("--header", help="Check structure and sizes only: payload is not read.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Files that are read at a time.")] = 4,
    as_json: Json = False,
) -> None:
    """Check a checkpoint's structure and every byte of it, and name all that is damaged."""
    directory = find_checkpoint(as_path(checkpoint))
    report = Report(str(directory), FORMAT_NAME if (directory / MANIFEST_NAME).exists() else STOCK_FORMAT)
    damage: list[Finding] = []
    with progress_bar() as bar, reading(directory) as alive:

        def progress(count: int) -> None:
            alive()
            bar.advance(count)

        def begin(audit: Audit) -> None:
            if bar.shown:
                bar.begin(directory.name, audit.total_bytes())

        damage.extend(_findings(directory, report, Plan(header, workers, progress, begin)))
    if as_json:
        print_json(_as_data(report, damage))
    else:
        _show(report, damage)
    if damage:
        raise typer.Exit(1)


def _findings(directory: AnyPath, report: Report, plan: Plan) -> Iterator[Finding]:
    try:
        if report.format == FORMAT_NAME:
            yield from _audit(directory, report, plan)
        else:
            yield from _stock(directory, report)
    except (ManifestError, DamagedCheckpointError) as error:  # the head itself
        name = MANIFEST_NAME if report.format == FORMAT_NAME else DCP_METADATA
        file = error.key.rpartition("/")[2] if error.key else name
        yield Finding("manifest", file, error.expected, error.found)
        report.notes.append("nothing else was checked: the head cannot be read")


def _audit(directory: AnyPath, report: Report, plan: Plan) -> Iterator[Finding]:
    audit = Audit(directory, content=not plan.header, workers=plan.workers, progress=plan.progress)
    plan.begin(audit)
    yield from audit.findings()
    report.checked = {"keys": len(audit.manifest.keys), **audit.checked}
    if plan.header:
        report.notes.append("payload was not read (--header)")
    if audit.unread:
        report.notes.append(
            f"not checked: payload, keys and tiling that damaged tables describe ({', '.join(audit.unread)})"
        )
    listed = {file.name for file in audit.manifest.files}
    if (directory / DCP_METADATA).exists() and DCP_METADATA not in listed:
        report.notes.append(f"not checked: stock's view ({DCP_METADATA} and its values), which has no checksum here")


def _stock(directory: AnyPath, report: Report) -> Iterator[Finding]:
    report.notes.append(STOCK_NOTE)
    source = open_checkpoint(directory)
    report.checked = {"keys": len(source.head.keys)}
    yield from stock_findings(source)


def _as_data(report: Report, damage: Sequence[Finding]) -> dict[str, Any]:
    return {
        "checkpoint": report.directory,
        "format": report.format,
        "intact": not damage,
        "checked": report.checked,
        "notes": report.notes,
        "findings": [_finding_data(finding) for finding in damage],
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


def _show(report: Report, damage: list[Finding]) -> None:
    say(f"{report.directory}  ({report.format})")
    for finding in damage:
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
    if damage:
        say(f"{len(damage)} damaged.", style="bold red")
    else:
        say("No damage found." if report.notes else "Intact.", style="bold green")
