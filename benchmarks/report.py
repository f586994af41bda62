# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The page and the picture of the formats side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from benchmarks.cases import Measured
from benchmarks.costs import Cost
from benchmarks.harness import Found, table
from benchmarks.summary import Contest, contests, cost_table, factor_table, seconds, size_table, way_table

_NOTES = (
    "Seconds are those of the slowest rank, collectives and meetings those of the rank with most. All ranks begin a "
    "save or load together: a barrier before it is neither timed nor counted.",
    "*prepare* is, for the stock format, Bridge's `preprocess_fsdp_dtensor_state_dict` alone: building the state dicts "
    "of model and optimizer before it, and the planning of torch.distributed.checkpoint after it, are not in it. For "
    "ours it is everything before the first meeting: plan, optimizer state, and the message for the meeting.",
    "*save* and *load* are the whole calls of Bridge's checkpoint manager. Ours also flushes every file to disk, "
    "computes checksums and commits by a rename, and on load verifies every byte before it changes anything.",
    "*stall* is what training waits for a save: stock's whole call; of ours with `checkpoint.async_save`, its call and "
    "what the next optimizer step waits. Each such save has ended before the next one begins.",
    "Of `fsdp_dtensor` and `torch_dist` asynchronously only their call is counted, not what they wait later to "
    "finalise it: that is waited for here, after the next step, outside of all figures. Their writers run without a "
    "GPU (`cpu_shm_mode`), which they look for before they know what is to be written. Tensors in host memory they "
    "take as they are, without a copy: on a GPU the call would wait for that, too.",
    "`torch_dist` saves the same model under Megatron's distributed optimizer, fully parallel: it can't save "
    "Megatron-FSDP's. Its tensors are fewer: one for all experts of a layer.",
    "*first* is the first save of a run of `pretrain`, *later* are all others; either comes after a training step. "
    "Every run has processes of its own, which have imported Bridge, Transformer Engine and this package; what either "
    "format imports on first use is in its *first* and *load*.",
    "A *collective* is a call of a function of torch.distributed, barriers included; what it calls inside itself is "
    "not counted again. A *meeting* is one exchange of all ranks in the job's rendezvous store, without a collective.",
    "Checked in this run: Bridge was unpatched while stock was measured; every checkpoint held every element of every "
    "tensor; after each load the next training step gave, to the last bit, the loss of the run that never stopped.",
    "Before a load all files are on the disk, and out of the page cache. *but gather* is a load of ours without the "
    "gather of loaded weights that Megatron-FSDP ends it with.",
    "These are CPU ranks over gloo on one machine: absolute times are not those of a cluster of GPUs.",
)
_TINY = "The tensors are tiny, so it is the cost of a tensor that is measured, not bandwidth."

_COLOURS = {"stock": "#b8b8b8", "safe": "#2f7fc1"}
_NAMES = {"stock": "stock fsdp_dtensor", "safe": "fsdp_dtensor_safe"}
_WIDTH = 0.4


def body(found: Found) -> list[str]:
    """The tables, and what is to be said of them."""
    (stock, safe, beside), others, small = _parted(found)
    stock_beside, *dist = others
    lines, ways = contests(stock, safe, beside), [stock, stock_beside, *dist, safe, beside]
    tables = {
        f"{_title(stock)}, seconds": cost_table(lines),
        "How many times faster fsdp_dtensor_safe is (rounded down)": factor_table(lines),
        "What training waits for a save in each way, and for a load; seconds": way_table(ways),
        "Collectives of a save by the number of experts and ranks": size_table([stock, safe, *small]),
    }
    page = [line for title, (head, rows) in tables.items() for line in (f"\n## {title}\n", *table(head, rows))]
    return [*page, "\n## Notes\n", *(f"- {note}" for note in (*_NOTES, *_findings(stock, safe)))]


def _parted(found: Found) -> tuple[list[Measured], list[Measured], list[Measured]]:
    """Stock, ours, and ours asynchronously; Bridge's other ways to save; smaller cases."""
    cases = found["cases"]
    return cases[:3], cases[3:6], cases[6:]


def _title(stock: Measured) -> str:
    """Which model, on how many ranks."""
    return f"{stock.case.model} on {stock.case.ranks} CPU ranks"


def _findings(stock: Measured, safe: Measured) -> list[str]:
    """Notes that this run's numbers make."""
    size = (
        f"A checkpoint is {stock.size:,} bytes in {stock.keys:,} tensors with stock, and {safe.size:,} bytes in "
        f"{safe.keys:,} tensors with ours, all files counted."
    )
    return [
        *([_TINY] if stock.case.size.experts else []),
        size,
        *(f"Collectives of one {kind}, rank 0: {_named((stock, safe), kind)}." for kind in ("save", "load")),
    ]


def _named(sides: tuple[Measured, Measured], kind: str) -> str:
    """Which collectives the last call of a kind issued."""
    found = []
    for title, measured in zip(("stock", "ours"), sides, strict=True):
        runs = [*measured.trained, *measured.resumed]
        calls = [call for run in runs for call in run[0].calls if call.kind == kind]
        names = sorted(calls[-1].names.items(), key=lambda item: -item[1])
        found.append(f"{title} " + (", ".join(f"{count:,} {name}" for name, count in names) or "none"))
    return "; ".join(found)


def draw(found: Found, path: Path) -> None:
    """Write the PNG."""
    (stock, safe, beside), *_ = _parted(found)
    lines, title = contests(stock, safe, beside), _title(stock)
    matplotlib.use("Agg")
    figure = Figure(figsize=(12, 4.8), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_seconds(left, lines)
    _draw_collectives(right, lines)
    for axes in (left, right):
        _finish(axes, lines)
    figure.suptitle(title, fontsize=11)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path)


def _draw_seconds(axes: Axes, lines: Sequence[Contest]) -> None:
    for side, name in enumerate(_COLOURS):
        spreads = [seconds(_costs(line, name)) for line in lines]
        tops = [spread.median for spread in spreads]
        errors = [
            [spread.median - spread.least for spread in spreads],
            [spread.most - spread.median for spread in spreads],
        ]
        places = _places(lines, side)
        axes.bar(places, tops, _WIDTH, color=_COLOURS[name], label=_NAMES[name])
        axes.errorbar(places, tops, yerr=errors, fmt="none", ecolor="#404040", elinewidth=0.8, capsize=2)
        for place, spread in zip(places, spreads, strict=True):
            _write(axes, place, spread.most, _short(spread.median))
    axes.set_yscale("log")
    axes.set_ylabel("seconds of the slowest rank")
    axes.set_title("Time: median, with least and most", fontsize=10)
    low, high = axes.get_ylim()
    axes.set_ylim(low / 2, high * 2)
    axes.yaxis.set_minor_locator(NullLocator())


def _draw_collectives(axes: Axes, lines: Sequence[Contest]) -> None:
    for side, name in enumerate(_COLOURS):
        tops = [max(cost.collectives for cost in _costs(line, name)) for line in lines]
        places = _places(lines, side)
        axes.bar(places, tops, _WIDTH, color=_COLOURS[name], label=_NAMES[name])
        for place, top in zip(places, tops, strict=True):
            _write(axes, place, top, f"{top:,}")
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(0, axes.get_ylim()[1] * 3)
    axes.set_ylabel("collectives of one rank")
    axes.set_title("Collectives, barriers included", fontsize=10)


def _finish(axes: Axes, lines: Sequence[Contest]) -> None:
    axes.set_xticks(range(len(lines)), [line.title.replace(", ", "\n") for line in lines])
    axes.tick_params(axis="x", length=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", which="major", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)


def _costs(line: Contest, name: str) -> list[Cost]:
    return line.stock if name == "stock" else line.safe


def _places(lines: Sequence[Contest], side: int) -> list[float]:
    return [index + (side - 0.5) * _WIDTH for index in range(len(lines))]


def _write(axes: Axes, place: float, height: float, text: str) -> None:
    axes.annotate(text, (place, height), (0, 3), textcoords="offset points", ha="center", fontsize=7.5)


def _short(value: float) -> str:
    return f"{value:#.3g}" if value < 100 else f"{value:.0f}"
