# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The results of opening and committing as a page, as JSON and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.scale import opening
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


def page(about: dict[str, str], found: Sequence[Opening], planned: Sequence[Planned]) -> str:
    """Everything, as Markdown."""
    lines = [
        f"# Opening and committing what many ranks wrote\n\n{(opening.__doc__ or '').partition(chr(10))[2].strip()}\n"
    ]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    lines += [
        "\n| ranks | chunks a rank | keys | what | CPU, s | in all, s | read, MB | memory, MB | chunks found |",
        "| ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in found:
        figures = f"{one.cpu:.2f} | {one.seconds:.2f} | {one.bytes_read / 1e6:.1f} | {one.memory / 1e6:.0f}"
        number = f"{one.found:,}" if one.kind != "commit" else ""
        lines.append(f"| {one.ranks:,} | {one.chunks:,} | {one.keys:,} | {one.kind} | {figures} | {number} |")
    lines += [
        "\nGrowth with the number of ranks, as the exponent of a power that fits best (0: flat, 1: in proportion):\n"
    ]
    lines += ["| chunks a rank | what | CPU | bytes read |", "| ---: | --- | ---: | ---: |"]
    for chunks in sorted({one.chunks for one in found}):
        for kind in KINDS:
            cpu, read = growth(found, kind, chunks)
            lines.append(f"| {chunks:,} | {kind} | {cpu:.2f} | {read:.2f} |")
    if planned:
        lines += [
            "\nPlain DCP's coordinator, its global plan and the validation of it, for as many ranks as were tried:\n"
        ]
        lines += ["| ranks | chunks a rank | CPU, s |", "| ---: | ---: | ---: |"]
        lines += [f"| {one.ranks:,} | {one.chunks:,} | {one.cpu:.1f} |" for one in planned]
    return "\n".join(lines) + "\n"


def write(about: dict[str, str], found: Sequence[Opening], planned: Sequence[Planned], folder: Path) -> list[Path]:
    """The page, its figures, and a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    text, data, picture = (folder / f"scale_opening.{end}" for end in ("md", "json", "png"))
    text.write_text(page(about, found, planned) + f"\n![CPU seconds and bytes read by ranks]({picture.name})\n")
    measured = {"measured": [asdict(one) for one in found], "dcp": [asdict(one) for one in planned]}
    data.write_text(json.dumps({"about": about, **measured}, indent=1) + "\n")
    draw(found, planned, picture)
    return [text, data, picture]


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
