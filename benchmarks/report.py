# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A benchmark's results: tables in the terminal, and three files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.cases import Found, Measured
from benchmarks.plot import draw
from benchmarks.summary import Contest, contests, cost_table, factor_table, size_table, way_table

_WIDTH = 80  # of a terminal that says nothing else, a pipe for example

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


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that is reported.

    Args:
        name: Of the files.
        about: Date, command, machine, versions and so on, in order.
        found: What was measured.
    """

    name: str
    about: dict[str, str]
    found: Found

    def contests(self) -> list[Contest]:
        """What was measured of both."""
        stock, safe, beside = self.found.sides
        return contests(stock, safe, beside)

    def title(self) -> str:
        """Which model, on how many ranks."""
        case = self.found.sides[0].case
        return f"{case.size} on {case.ranks} CPU ranks"

    def tables(self) -> list[tuple[str, tuple[list[str], list[list[str]]]]]:
        """Each with its title."""
        lines, found = self.contests(), self.found
        return [
            (f"{self.title()}, seconds", cost_table(lines)),
            ("How many times faster fsdp_dtensor_safe is (rounded down)", factor_table(lines)),
            ("What training waits for a save in each way, and for a load; seconds", way_table(_ways(found))),
            ("Collectives of a save by the number of experts and ranks", size_table([*found.sides[:2], *found.small])),
        ]


def _ways(found: Found) -> list[Measured]:
    """By format, each without and with the training beside it."""
    stock, safe, safe_beside = found.sides
    stock_beside, *dist = found.others
    return [stock, stock_beside, *dist, safe, safe_beside]


def show(results: Results) -> None:
    """Print the tables."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    for title, (head, rows) in results.tables():
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for index, name in enumerate(head):
            table.add_column(name, no_wrap=True, justify="right" if rows[0][index][:1].isdigit() else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print()


def write(results: Results, directory: Path) -> list[Path]:
    """Write the Markdown, JSON and PNG files."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{results.name}{suffix}" for suffix in (".md", ".json", ".png")]
    paths[0].write_text(_markdown(results))
    paths[1].write_text(json.dumps(_raw(results), indent=1) + "\n")
    draw(results.contests(), results.title(), paths[2])
    return paths


def _markdown(results: Results) -> str:
    parts = [
        "# Stock `fsdp_dtensor` and `fsdp_dtensor_safe`, side by side",
        f"![Seconds and collectives of both formats]({results.name}.png)",
    ]
    for title, (head, rows) in results.tables():
        parts += [f"## {title}", _markdown_table(head, rows)]
    parts += ["## Notes", "\n".join(f"- {note}" for note in (*_NOTES, *_findings(results)))]
    parts += ["## Where and how", _markdown_table(["", ""], [[key, value] for key, value in results.about.items()])]
    parts.append(f"Raw samples of every rank: [{results.name}.json]({results.name}.json).")
    return "\n\n".join(parts) + "\n"


def _markdown_table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _findings(results: Results) -> list[str]:
    """Notes that this run's numbers make."""
    stock, safe, _ = results.found.sides
    size = (
        f"A checkpoint is {stock.size:,} bytes in {stock.keys:,} tensors with stock, and {safe.size:,} bytes in "
        f"{safe.keys:,} tensors with ours, all files counted."
    )
    return [
        *([_TINY] if results.found.sides[0].case.size.experts else []),
        size,
        *(f"Collectives of one {kind}, rank 0: {_named(results.found.sides, kind)}." for kind in ("save", "load")),
    ]


def _named(sides: list[Measured], kind: str) -> str:
    """Which collectives the last call of a kind issued."""
    found = []
    for title, measured in zip(("stock", "ours"), sides[:2], strict=True):
        runs = [*measured.trained, *measured.resumed]
        calls = [call for run in runs for call in run[0].calls if call.kind == kind]
        names = sorted(calls[-1].names.items(), key=lambda item: -item[1])
        found.append(f"{title} " + (", ".join(f"{count:,} {name}" for name, count in names) or "none"))
    return "; ".join(found)


def _raw(results: Results) -> dict[str, Any]:
    found = results.found
    measured_cases = *found.sides, *found.others, *found.small
    return {"about": results.about, "cases": [asdict(measured) for measured in measured_cases]}
