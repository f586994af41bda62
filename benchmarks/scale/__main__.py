# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The command line: `python -m benchmarks.scale meetings`, `python -m benchmarks.scale opening`."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks.scale import chunks, dcp, meetings, opening, pages, planning
from tools.circumstances import circumstances

_RESULTS = Path(__file__).parents[1] / "results"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    what = parser.add_subparsers(dest="what", required=True)
    meeting = what.add_parser("meetings", help="meetings of real processes in a real store, and the protocol before")
    meeting.add_argument("--ranks", type=int, nargs="+", default=list(meetings.RANKS), help="sizes of the job")
    meeting.add_argument("--repeats", type=int, default=9, help="meetings of each, the first left out (default: 9)")
    opened = what.add_parser("opening", help="opening and committing what many ranks wrote, and plain DCP's planner")
    opened.add_argument("--ranks", type=int, nargs="+", default=list(opening.RANKS), help="sizes of the job")
    opened.add_argument("--chunks", type=int, nargs="+", default=list(opening.CHUNKS), help="chunks of a rank")
    opened.add_argument("--dcp", type=int, nargs="*", default=list(opening.DCP_RANKS), help="ranks for plain DCP")
    opened.add_argument("--repeats", type=int, default=3, help="runs of each (default: 3)")
    opened.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="where indexes are written")
    small = what.add_parser("chunks", help="saves and loads of many small tensors, beside another checkout")
    small.add_argument("--against", type=Path, required=True, help="root of the other checkout")
    small.add_argument("--layers", type=int, nargs="+", default=[9, 93], help="of the models (default: 9 93)")
    small.add_argument("--ranks", type=int, default=4, help="real ranks (default: 4)")
    small.add_argument("--runs", type=int, default=3, help="runs of each checkout, in turn (default: 3)")
    small.add_argument("--repeats", type=int, default=5, help="saves and loads of a run (default: 5)")
    planned = what.add_parser("planning", help="planning a rank's part of a save of Qwen3.5-397B, first and later")
    planned.add_argument("--ranks", type=int, nargs="+", default=list(planning.RANKS), help="sizes of the job")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    command = shlex.join(["python", "-m", "benchmarks.scale", *sys.argv[1:]])
    about = circumstances(Path(tempfile.gettempdir()), command=command)
    if (load := os.getloadavg()[0]) > 1.5:
        console.print(f"the machine is busy (load {load:.2f}): these figures are too high")
    measure = {"meetings": _meetings, "opening": _opening, "chunks": _chunks, "planning": _planning}[arguments.what]
    text, paths = measure(arguments, about, console)
    console.print(text, markup=False, soft_wrap=True)
    for path in paths:
        console.print(f"wrote {path}")


def _meetings(arguments: argparse.Namespace, about: dict[str, str], console: Console) -> tuple[str, list[Path]]:
    found = meetings.measure(arguments.ranks, arguments.repeats, console.print)
    return meetings.page(about, found), meetings.write(about, found, arguments.results)


def _opening(arguments: argparse.Namespace, about: dict[str, str], console: Console) -> tuple[str, list[Path]]:
    found = []
    for number in arguments.chunks:
        for ranks in arguments.ranks:
            found += opening.measure(arguments.scratch, ranks, number, arguments.repeats)
            console.print(f"{ranks} ranks of {number} chunks: {found[-3].cpu:.2f} s of CPU in the same layout")
    planned = [dcp.measure(ranks, arguments.chunks[0]) for ranks in arguments.dcp]
    return pages.page(about, found, planned), pages.write(about, found, planned, arguments.results)


def _chunks(arguments: argparse.Namespace, about: dict[str, str], console: Console) -> tuple[str, list[Path]]:
    against = arguments.against.resolve()
    rows = chunks.measure(against, arguments.layers, arguments.ranks, arguments.runs, arguments.repeats)
    other = versions_of(against)
    text = chunks.page(about, other, rows)
    arguments.results.mkdir(parents=True, exist_ok=True)
    table, numbers = arguments.results / "scale_chunks.md", arguments.results / "scale_chunks.json"
    table.write_text(text)
    numbers.write_text(json.dumps({"about": about, "other": other, "rows": rows}, indent=1) + "\n")
    return text, [table, numbers]


def _planning(arguments: argparse.Namespace, about: dict[str, str], console: Console) -> tuple[str, list[Path]]:
    found = []
    for ranks in arguments.ranks:
        found += planning.measure(ranks)
        console.print(f"{ranks} ranks: {len(found)} ranks planned")
    return planning.page(about, found), planning.write(about, found, arguments.results)


def versions_of(checkout: Path) -> str:
    """The commit of a checkout."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
