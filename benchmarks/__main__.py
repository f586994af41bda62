# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The command line: `python -m benchmarks`."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from benchmarks.cases import Suite, run_suite
from benchmarks.model import LARGE, Size
from benchmarks.report import Results, show, write
from tools.circumstances import circumstances

_RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Measure, print, write."""
    arguments = _parse_arguments()
    progress = Console(stderr=True, highlight=False)
    began = time.monotonic()
    scratch = arguments.scratch or Path(tempfile.gettempdir())
    command = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
    about = circumstances(scratch, command=command, repeats=str(arguments.repeats))

    def say(text: str) -> None:
        progress.print(f"{time.monotonic() - began:6.1f} s  {text}", soft_wrap=True)

    suite = Suite.of(arguments.repeats, quick=arguments.quick, size=arguments.size)
    found = run_suite(suite, scratch, say)
    about["duration"] = f"{time.monotonic() - began:.0f} s"
    results = Results(arguments.name, about, found)
    show(results)
    for path in write(results, arguments.results):
        say(f"wrote {path}")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure stock fsdp_dtensor and fsdp_dtensor_safe side by side, in real pretrain() on CPU ranks.",
    )
    parser.add_argument("--quick", action="store_true", help="a much smaller model and one repeat; a minute or two")
    parser.add_argument(
        "--size",
        help=f"of the sides: experts x layers, such as 128x12 (default: 64x4), or large tensors: {', '.join(LARGE)}",
    )
    parser.add_argument("--repeats", type=_positive, help="rounds of all ways to save (default: 3; with --quick 1)")
    parser.add_argument("--scratch", type=Path, help="where checkpoints are written and removed (default: /tmp)")
    parser.add_argument("--results", type=Path, help="folder of the results (default: benchmarks/results)")
    parser.add_argument("--name", help="name of the result files (default: stock_and_safe, and the size's if large)")
    arguments = parser.parse_args()
    arguments.repeats = arguments.repeats or (1 if arguments.quick else 3)
    arguments.results = arguments.results or (Path("out/benchmarks") if arguments.quick else _RESULTS)
    large = f"_{arguments.size.replace(' ', '_')}" if arguments.size in LARGE else ""
    arguments.name = arguments.name or ("quick" if arguments.quick else f"stock_and_safe{large}")
    arguments.size = None if arguments.size is None else _size(parser, arguments.size)
    return arguments


def _size(parser: argparse.ArgumentParser, text: str) -> Size:
    if text in LARGE:
        return LARGE[text]
    try:
        experts, layers = text.split("x")
        return Size(_positive(experts), _positive(layers))
    except (ValueError, argparse.ArgumentTypeError):
        parser.error(f"--size {text}: neither experts x layers nor one of {', '.join(LARGE)}")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


if __name__ == "__main__":
    main()
