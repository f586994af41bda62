# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The results of opening and committing as a page and as a picture."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness import Benchmark, Found, Say, positive, table
from benchmarks.scale import dcp, opening
from benchmarks.scale.dcp import Planned
from benchmarks.scale.opening import KINDS, Kind, Opening

_COLOURS: dict[str, str] = {"same layout": "#2f7fc1", "another layout": "#e08a2c", "commit": "#4a9a4a"}
_DCP = "#b8b8b8"


def growth(found: Sequence[Opening], kind: Kind, chunks: int) -> tuple[float, float]:
    """What CPU seconds and bytes read grow with: the exponent of the number of ranks that fits best; flat is 0."""
    points = [one for one in found if one.kind == kind and one.chunks == chunks]
    ranks = np.log([one.ranks for one in points])
    cpu, read = np.log([one.cpu for one in points]), np.log([one.bytes_read for one in points])
    return float(np.polyfit(ranks, cpu, 1)[0]), float(np.polyfit(ranks, read, 1)[0])


def _body(found: Found) -> list[str]:
    """What was measured, how it grows with the number of ranks, and plain DCP's part."""
    opened, planned = found["measured"], found["dcp"]
    head = ["ranks", "chunks a rank", "keys", "what", "CPU, s", "in all, s", "read, MB", "memory, MB", "chunks found"]
    lines = table(head, map(_row, opened))
    lines += [
        "\nGrowth with the number of ranks, as the exponent of a power that fits best (0: flat, 1: in proportion):\n"
    ]
    grown = (
        [f"{chunks:,}", kind, *(f"{exponent:.2f}" for exponent in growth(opened, kind, chunks))]
        for chunks in sorted({one.chunks for one in opened})
        for kind in KINDS
    )
    lines += table(["chunks a rank", "what", "CPU", "bytes read"], grown)
    if planned:
        lines += [
            "\nPlain DCP's coordinator, its global plan and the validation of it, for as many ranks as were tried:\n"
        ]
        rows = ([f"{one.ranks:,}", f"{one.chunks:,}", f"{one.cpu:.1f}"] for one in planned)
        lines += table(["ranks", "chunks a rank", "CPU, s"], rows)
    return lines


def _row(one: Opening) -> list[str]:
    figures = f"{one.cpu:.2f}", f"{one.seconds:.2f}", f"{one.bytes_read / 1e6:.1f}", f"{one.memory / 1e6:.0f}"
    chunks = f"{one.found:,}" if one.kind != "commit" else ""
    return [f"{one.ranks:,}", f"{one.chunks:,}", f"{one.keys:,}", one.kind, *figures, chunks]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=positive, nargs="+", default=opening.RANKS, help="sizes of the job")
    parser.add_argument("--chunks", type=positive, nargs="+", default=opening.CHUNKS, help="chunks of a rank")
    parser.add_argument("--dcp", type=positive, nargs="*", default=opening.DCP_RANKS, help="ranks for plain DCP")


def _measure(arguments: argparse.Namespace, say: Say) -> Iterator[Found]:
    found: list[Opening] = []
    for number in arguments.chunks:
        for ranks in arguments.ranks:
            found += opening.measure(arguments.scratch, ranks, number, arguments.repeats)
            say(f"{ranks} ranks of {number} chunks: {found[-3].cpu:.2f} s of CPU in the same layout")
    yield {"measured": found, "dcp": [dcp.measure(ranks, arguments.chunks[0]) for ranks in arguments.dcp]}


def _draw(found: Found, path: Path) -> None:
    draw(found["measured"], found["dcp"], path)


def draw(found: Sequence[Opening], planned: Sequence[Planned], path: Path) -> None:
    """Write the PNG."""
    matplotlib.use("Agg")
    figure = Figure(figsize=(11, 4.6), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    for chunks in sorted({one.chunks for one in found}):
        for kind in KINDS:
            points = [one for one in found if one.kind == kind and one.chunks == chunks]
            style = "-" if chunks == min(one.chunks for one in found) else "--"
            ranks, label = [one.ranks for one in points], f"{kind}, {chunks:,} chunks a rank"
            left.plot(ranks, [one.cpu for one in points], style, marker="o", ms=4, color=_COLOURS[kind], label=label)
            right.plot(ranks, [one.bytes_read / 1e6 for one in points], style, marker="o", ms=4, color=_COLOURS[kind])
    if planned:
        label = f"plain DCP's coordinator, {planned[0].chunks:,} chunks a rank"
        left.plot(
            [one.ranks for one in planned], [one.cpu for one in planned], ":", marker="s", ms=4, color=_DCP, label=label
        )
    for axes, title in ((left, "CPU seconds of one rank"), (right, "MB read by one rank")):
        _finish(axes, title)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    figure.savefig(path)


def _finish(axes: Axes, title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set_xlabel("ranks that wrote the checkpoint")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(which="major", color="#e4e4e4", linewidth=0.6)


BENCHMARK = Benchmark(
    command="python -m benchmarks.scale opening",
    name="scale_opening",
    title="Opening and committing what many ranks wrote",
    about=opening.__doc__,
    measure=_measure,
    body=_body,
    draw=_draw,
    options=_options,
    repeats=3,
)
