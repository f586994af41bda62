# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The tables of README.md and docs/benchmarks.md, looked up in the results:  python -m benchmarks.figures  writes them.

A page has `<!-- figures: NAME -->`, the table, `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PAGES = (REPOSITORY / "README.md", REPOSITORY / "docs" / "benchmarks.md")
MARKED = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

MANY, FEW = "stock_and_safe", "stock_and_safe_0.43_GB"
EACH = {
    MANY: "MoE of 64 experts x 8 layers on 4 CPU ranks, seconds",
    FEW: "2 dense layers, 1,024 wide on 4 CPU ranks, seconds",
}
WAITS = "What training waits for a save in each way, and for a load; seconds"
FORMATS = ("fsdp_dtensor", "torch_dist", "fsdp_dtensor_safe")

Lines = Iterator[Sequence[str]]


@cache
def section(file: str, title: str) -> str:
    """What a results' page has under a heading."""
    text = (RESULTS / f"{file}.md").read_text()
    _, found, after = text.partition(f"\n## {title}\n")
    if not found:
        raise LookupError(f"{file}.md has no section {title!r}")
    return after.partition("\n## ")[0]


def cell(file: str, title: str, keys: Sequence[str], column: str) -> float:
    """A number: of the row whose first cells are `keys`, in the table that has `column`."""
    heading: list[str] = []
    for line in section(file, title).splitlines():
        cells = [one.strip() for one in line.strip("|").split("|")] if line.startswith("|") else []
        if cells and not heading:
            heading = cells
        elif cells[: len(keys)] == list(keys) and column in heading:
            return float(cells[heading.index(column)])
        elif not cells:
            heading = []
    raise LookupError(f"{file}.md has no {column!r} of {keys} under {title!r}")


def text(number: float) -> str:
    """Three digits, as on the pictures."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _seconds_and_collectives(kind: str, who: str) -> str:
    counted = cell(MANY, EACH[MANY], (kind, who), "collectives")
    return f"{text(cell(MANY, EACH[MANY], (kind, who), 'median'))} ({counted:,.0f})"


def headline() -> Lines:
    """Stock's format and this one, of many tensors."""
    yield "median seconds (collectives)", "stock `fsdp_dtensor`", "`fsdp_dtensor_safe`"
    yield "save", *(_seconds_and_collectives("save, later", who) for who in ("stock", "safe"))
    waits = (text(cell(MANY, WAITS, (name, "yes"), "later")) for name in (FORMATS[0], FORMATS[2]))
    yield "training waits for an asynchronous save", *waits
    yield "load", *(_seconds_and_collectives("load", who) for who in ("stock", "safe"))


def formats(file: str) -> Lines:
    """The same with `torch_dist`."""
    yield "median seconds", *(f"`{name}`" for name in FORMATS)
    for row, beside, column in (
        ("save, first of a run", "no", "first"),
        ("save, later ones", "no", "later"),
        ("training waits for an asynchronous save, first", "yes", "first"),
        ("training waits for an asynchronous save, later ones", "yes", "later"),
        ("load", "no", "load"),
    ):
        yield row, *(text(cell(file, WAITS, (name, beside), column)) for name in FORMATS)
    if file == FEW:
        yield (
            "load without the gather that Megatron-FSDP ends it with",
            "",
            "",
            text(cell(file, WAITS, (FORMATS[2], "no"), "but gather")),
        )


def disk(*sizes: str) -> Lines:
    """Beside what the disk can do."""
    yield "median seconds", "raw", "`fsdp_dtensor_safe`", "plain DCP", "torch_checkpointing"
    for size in sizes:
        for row, raw, kind, more in (
            ("save", "raw write", "save", ""),
            ("load", "raw read", "load", " but for the gather"),
            ("load, another layout", "", "load", " but for the gather, another layout"),
        ):
            fastest = min(cell("disk", size, (f"{raw}, {way}",), "s") for way in ("page cache", "direct")) if raw else 0
            others = [f"{row}, {who}" for who in ("DCP", "torch_checkpointing")]
            numbers = [cell("disk", size, (name,), "s") for name in (f"{kind}{more}", *others)]
            yield f"{row}, {size}", text(fastest) if raw else "", *map(text, numbers)


def waits() -> Lines:
    """What training waits for an asynchronous save, beside one copy in memory."""
    yield "median milliseconds", "one copy in memory", "`fsdp_dtensor_safe`", "plain DCP", "torch_checkpointing"
    of = ("ours, beside", "DCP, process", "torch_checkpointing, process")
    for size, name in (
        ("0.43 GB", "0.43 GB"),
        ("1.7 GB", "1.7 GB"),
        ("0.43 GB, offloaded", "0.43 GB, optimizer on the host"),
        ("0.43 GB, 4 ranks", "0.43 GB on 4 ranks"),
        ("64 experts x 4 layers", "1,200 small tensors a rank"),
        ("128 experts x 12 layers", "8,000 small tensors a rank"),
    ):
        copy = re.search(r"One copy in memory: ([0-9.]+) ms", section("beside", size))
        if copy is None:
            raise LookupError(f"beside.md has no copy in memory under {size!r}")
        yield name, text(float(copy[1])), *(text(cell("beside", size, (kind,), "stall, ms")) for kind in of)


TABLES: dict[str, Callable[[], Lines]] = {
    "headline": headline,
    "many": partial(formats, MANY),
    "few": partial(formats, FEW),
    "disk": partial(disk, "1.7 GB", "4 GB"),
    "small": partial(disk, "64 experts x 4 layers"),
    "waits": waits,
}


def rewritten(page: str) -> str:
    """A page with its tables as the results have them."""

    def table(found: re.Match[str]) -> str:
        head, *rows = (f"| {' | '.join(cells)} |" for cells in TABLES[found[2]]())
        rule = f"|{' --- |' * (head.count('|') - 1)}"
        return "\n".join((found[1], head, rule, *rows, "", found[3]))

    return MARKED.sub(table, page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(rewritten(path.read_text()))
