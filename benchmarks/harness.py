# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What all benchmarks share: command line, ranks, turns, timing, medians, and results as pages, JSON and pictures."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from testing.modules import MEGATRON_MODULES, installed
from testing.ranks import RankPool
from tools.circumstances import circumstances

RESULTS = Path(__file__).parent / "results"
_QUICK_RESULTS = Path("out/benchmarks")
_BUSY = 1.5
"""Load of the machine, above which its figures are too high."""

Numbers = dict[str, list[float]]
"""What one rank measured, by name: one number a turn."""

Found = dict[str, Any]
"""What a benchmark has measured, as it is written to JSON; dataclasses may be in it."""

Say = Callable[[str], None]
"""Tells the terminal what goes on."""


def _nothing(parser: argparse.ArgumentParser) -> None:
    """Add no options."""


def _no_suffix(arguments: argparse.Namespace) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One of them.

    Args:
        command: What a user types.
        name: Of the results' files.
        title: Of the page.
        about: The docstring of its module; its first line, for which the title stands, is left out of the page.
        measure: Yields everything found so far, each time that there is more: what was found before an error is kept.
        body: The page after the circumstances, as lines.
        draw: Draws what was found; None for no picture.
        options: Adds options of its own.
        suffix: What a run's arguments add to the results' name.
        repeats: How often each thing is measured by default.
        quick: Whether it has a quick look, whose results go to out/benchmarks.
    """

    command: str
    name: str
    title: str
    about: str | None
    measure: Callable[[argparse.Namespace, Say], Iterator[Found]]
    body: Callable[[Found], list[str]]
    draw: Callable[[Found, Path], None] | None = None
    options: Callable[[argparse.ArgumentParser], None] = _nothing
    suffix: Callable[[argparse.Namespace], str] = _no_suffix
    repeats: int = 5
    quick: bool = False

    def main(self, words: Sequence[str] | None = None) -> None:
        """Measure, write, print.

        Args:
            words: The command line; None for the process's own.
        """
        words = sys.argv[1:] if words is None else words
        arguments = self._parsed(words)
        terminal, began = Console(stderr=True, highlight=False), time.monotonic()

        def say(text: str) -> None:
            terminal.print(f"{time.monotonic() - began:6.1f} s  {text}", soft_wrap=True)

        if (load := os.getloadavg()[0]) > _BUSY:
            say(f"the machine is busy (load {load:.2f}): these figures are too high")
        command = f"{self.command} {shlex.join(words)}".strip()
        about = circumstances(arguments.scratch, command=command, repeats=str(arguments.repeats))
        page = ""
        for found in self.measure(arguments, say):
            about["duration"] = f"{time.monotonic() - began:.0f} s"
            page = self.page(about, found, arguments)
            if not arguments.dry:
                self._write(about, found, page, arguments, say)
        Console(highlight=False).print(page, markup=False, soft_wrap=True)

    def page(self, about: Mapping[str, str], found: Found, arguments: argparse.Namespace) -> str:
        """What was measured, a picture of it, on what it was measured, and the tables."""
        lines = [f"# {self.title}\n", (self.about or "").partition("\n")[2].strip(), ""]
        if self.draw is not None:
            lines += [f"![{self.title}, as a picture]({self._name(arguments)}.png)\n"]
        lines += [f"- {name}: {value}" for name, value in about.items()]
        return "\n".join([*lines, "", *self.body(found)]) + "\n"

    def _name(self, arguments: argparse.Namespace) -> str:
        return f"{self.name}{self.suffix(arguments)}"

    def _write(
        self, about: Mapping[str, str], found: Found, page: str, arguments: argparse.Namespace, say: Say
    ) -> None:
        arguments.results.mkdir(parents=True, exist_ok=True)
        text, data, picture = (
            arguments.results / f"{self._name(arguments)}.{ending}" for ending in ("md", "json", "png")
        )
        text.write_text(page)
        data.write_text(json.dumps({"about": about, **found}, indent=1, default=asdict) + "\n")
        if self.draw is not None:
            self.draw(found, picture)
        say(f"wrote {text}")

    def _parsed(self, words: Sequence[str]) -> argparse.Namespace:
        parser = argparse.ArgumentParser(
            prog=self.command, description=self.about, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self.options(parser)
        once = "; once with --quick" if self.quick else ""
        parser.add_argument("--repeats", type=positive, help=f"of each measurement (default: {self.repeats}{once})")
        parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="where checkpoints go")
        parser.add_argument("--results", type=Path, help="folder of the results (default: benchmarks/results)")
        parser.add_argument("--dry", action="store_true", help="write no results")
        if self.quick:
            parser.add_argument("--quick", action="store_true", help="a look; its results go to out/benchmarks")
        arguments = parser.parse_args(words)
        quick = self.quick and arguments.quick
        arguments.repeats = arguments.repeats or (1 if quick else self.repeats)
        arguments.results = arguments.results or (_QUICK_RESULTS if quick else RESULTS)
        return arguments


def positive(text: str) -> int:
    """A number of the command line, at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


@contextmanager
def ranks_of(
    size: int, scratch: Path | None, preload: Sequence[str] = MEGATRON_MODULES
) -> Iterator[tuple[RankPool, Path]]:
    """Real ranks, and a folder that they share, both gone after the block.

    Args:
        size: How many.
        scratch: Where the folder is made.
        preload: What ranks import before CUDA is replaced, as far as it is installed.
    """
    with (
        tempfile.TemporaryDirectory(prefix="benchmark-", dir=scratch) as folder,
        RankPool(size, preload=installed(preload), time_limit=3600.0, nan_memory=False) as pool,
    ):
        yield pool, Path(folder)


def timed(action: Callable[[], object]) -> float:
    """Seconds of a call on this rank; a barrier, which is not counted, lets all ranks begin together."""
    import torch.distributed as dist

    dist.barrier()
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def in_turns[V](turn: Callable[[], Iterable[tuple[str, V]]], repeats: int) -> dict[str, list[V]]:
    """What turns yield by name: all kinds take turns, so that none has the machine at a better time than others.

    Args:
        turn: Measures each kind once.
        repeats: How many turns count; one more comes before them, in which everything is done for the first time.
    """
    numbers: dict[str, list[V]] = {}
    for number in range(repeats + 1):
        for name, value in turn():
            if number:
                numbers.setdefault(name, []).append(value)
    return numbers


def slowest_turns(ranks: Sequence[Numbers]) -> Numbers:
    """Of each turn the slowest rank's number, by name."""
    return {name: list(map(max, zip(*(numbers[name] for numbers in ranks), strict=True))) for name in ranks[0]}


def slowest(ranks: Sequence[Numbers]) -> dict[str, float]:
    """The median over turns of the slowest rank's, by name."""
    return {name: statistics.median(values) for name, values in slowest_turns(ranks).items()}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown, as lines."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
