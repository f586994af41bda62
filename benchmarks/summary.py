# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""From measurements to the lines of the tables and the bars of the plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cases import Measured, Order, but_for_gather, preparation, whole
from benchmarks.costs import Cost, Spread
from benchmarks.training import SAFE

PREPARE_GOAL, SAVE_GOAL, STALL_GOAL = 100, 10, 54
"""How many times faster than stock this format is to prepare, and to save; and how many times less training waits.
Of many tensors: few large ones are written by whatever the disk can do."""


@dataclass(frozen=True, slots=True)
class Contest:
    """One thing that was measured of both formats.

    Args:
        title: What.
        stock: The slowest rank's cost of each repetition, stock format.
        safe: The same of ours.
        goal: How many times faster ours is to be, if that was promised.
    """

    title: str
    stock: list[Cost]
    safe: list[Cost]
    goal: int | None = None

    @property
    def factor(self) -> float:
        """Stock's median over ours."""
        return seconds(self.stock).median / seconds(self.safe).median

    @property
    def least_factor(self) -> float:
        """Stock's fastest over our slowest."""
        return seconds(self.stock).least / seconds(self.safe).most


def contests(stock: Measured, safe: Measured, beside: Measured) -> list[Contest]:
    """Everything that was measured of both; what was not repeated enough to exist is left out."""
    orders: tuple[Order, ...] = ("first", "later")
    saves = [(order, stock.saves(order), safe.saves(order)) for order in orders]
    stalls = [(order, whole(a)) for order, a, _ in saves]
    prepare, save, stall = (PREPARE_GOAL, SAVE_GOAL, STALL_GOAL) if stock.case.size.experts else (None, None, None)
    found = [
        *(Contest(f"prepare, {order}", preparation(a), preparation(b), prepare) for order, a, b in saves),
        *(Contest(f"save, {order}", whole(a), whole(b), save) for order, a, b in saves),
        *(Contest(f"stall, {order}", a, whole(beside.saves(order)), stall) for order, a in stalls),
        Contest("load", whole(stock.loads()), whole(safe.loads())),
    ]
    return [contest for contest in found if contest.stock and contest.safe]


def seconds(costs: Sequence[Cost]) -> Spread:
    """The spread of the seconds."""
    return Spread.of([cost.seconds for cost in costs])


def cost_table(lines: Sequence[Contest]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: seconds, collectives and meetings of each contest, one row a format."""
    head = ["measured", "format", "n", "median", "min", "max", "collectives", "meetings"]
    rows = []
    for line in lines:
        for name, costs in (("stock", line.stock), ("safe", line.safe)):
            spread = seconds(costs)
            times = [f"{value:.4f}" for value in (spread.median, spread.least, spread.most)]
            rows.append([line.title, name, str(spread.count), *times, collectives(costs), meetings(costs)])
    return head, rows


def factor_table(lines: Sequence[Contest]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: how many times faster, and whether that is what was promised."""
    head = ["measured", "median / median", "stock min / safe max", "goal", "reached"]
    rows = []
    for line in lines:
        goal = ["none", ""] if line.goal is None else [f"{line.goal}x", "yes" if line.factor >= line.goal else "no"]
        rows.append([line.title, times(line.factor), times(line.least_factor), *goal])
    return head, rows


def way_table(ways: Sequence[Measured]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: what training waits for one save, in each way to save, and for a load; of ours without gather."""
    head = ["format", "beside", "n", "first", "n", "later", "min", "max", "load", "but gather"]
    rows = []
    for way in ways:
        first, later = (seconds(whole(way.saves(order))) for order in ("first", "later"))
        loads, ours = whole(way.loads()), way.case.format == SAFE
        times = [f"{value:.3f}" for value in (later.median, later.least, later.most)]
        load = f"{seconds(loads).median:.3f}" if loads else ""
        without = f"{seconds(but_for_gather(way.loads())).median:.3f}" if loads and ours else ""
        beside = "yes" if way.case.beside else "no"
        of_saves = [str(first.count), f"{first.median:.3f}", str(later.count), *times]
        rows.append([way.case.format, beside, *of_saves, load, without])
    return head, rows


def size_table(cases: Sequence[Measured]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: collectives of a save by the number of experts and ranks."""
    head = ["experts", "layers", "ranks", "format", "tensors", "prepare", "save", "meetings"]
    rows = []
    order = sorted(cases, key=lambda m: (m.case.format == SAFE, m.case.size.experts, m.case.ranks))
    for measured in order:
        calls = [*measured.saves("first"), *measured.saves("later")]
        case, saves = measured.case, whole(calls)
        counts = [collectives(preparation(calls)), collectives(saves), meetings(saves)]
        name = "safe" if case.format == SAFE else "stock"
        numbers = [case.size.experts, case.size.layers, case.ranks]
        rows.append([*map(str, numbers), name, str(measured.keys), *counts])
    return head, rows


def collectives(costs: Sequence[Cost]) -> str:
    """How many, or from how many to how many."""
    return _range([cost.collectives for cost in costs])


def meetings(costs: Sequence[Cost]) -> str:
    """How many, or from how many to how many."""
    return _range([cost.meetings for cost in costs])


def times(factor: float) -> str:
    """A factor, rounded down."""
    return f"{math.floor(factor * 10) / 10:.1f}x"


def _range(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{least}" if least == most else f"{least} to {most}"
