"""The command line: `python -m benchmarks.scale meetings`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks.scale import meetings
from tools.circumstances import circumstances

_RESULTS = Path(__file__).parents[1] / "results"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    what = parser.add_subparsers(dest="what", required=True)
    meeting = what.add_parser("meetings", help="meetings of real processes in a real store, and the protocol before")
    meeting.add_argument("--ranks", type=int, nargs="+", default=list(meetings.RANKS), help="sizes of the job")
    meeting.add_argument("--repeats", type=int, default=9, help="meetings of each, the first left out (default: 9)")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    command = shlex.join(["python", "-m", "benchmarks.scale", *sys.argv[1:]])
    about = circumstances(Path(tempfile.gettempdir()), command=command)
    if (load := os.getloadavg()[0]) > 1.5:
        console.print(f"the machine is busy (load {load:.2f}): these figures are too high")
    found = meetings.measure(arguments.ranks, arguments.repeats, console.print)
    console.print(meetings.page(about, found), markup=False, soft_wrap=True)
    for path in meetings.write(about, found, arguments.results):
        console.print(f"wrote {path}")


if __name__ == "__main__":
    main()
