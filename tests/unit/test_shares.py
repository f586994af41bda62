# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Ranks that hold the same write equal parts of it, and every element once."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mbridge_fsdp_ckpt.plan.boxes import FlatRange, Shape
from mbridge_fsdp_ckpt.plan.layout import Axis, ParameterLayout
from mbridge_fsdp_ckpt.plan.shares import SLIVER, Line, Part, divide, shared_out
from mbridge_fsdp_ckpt.plan.slices import ParameterPlan, plan_parameter

ROW = 1 << 16  # bytes


@pytest.mark.parametrize(
    ("rows_before", "rows", "in_all", "ranks", "parts"),
    [
        pytest.param(0, 8, 8, 4, [(0, 0, 2), (1, 2, 4), (2, 4, 6), (3, 6, 8)], id="alone on the line"),
        pytest.param(0, 8, 8, 1, [(0, 0, 8)], id="held by one"),
        pytest.param(4, 8, 16, 2, [(0, 0, 4), (1, 4, 8)], id="over the middle"),
        pytest.param(4, 4, 16, 2, [(0, 0, 4)], id="before an edge"),
        pytest.param(8, 4, 16, 2, [(1, 0, 4)], id="behind an edge"),
        pytest.param(3, 2, 12, 3, [(0, 0, 1), (1, 1, 2)], id="one row each"),
        pytest.param(0, 5, 5, 2, [(0, 0, 3), (1, 3, 5)], id="cut between rows"),
    ],
)
def test_rows_of_a_block(
    rows_before: int, rows: int, in_all: int, ranks: int, parts: list[tuple[int, int, int]]
) -> None:
    assert list(Line(in_all * ROW, ranks).parts(rows_before * ROW, rows * ROW, rows)) == parts


def plans(shapes: list[Shape], replica: Axis) -> list[ParameterPlan]:
    """What a rank of so many that hold the same has of parameters: all, or all but the first element."""
    layouts = []
    for number, shape in enumerate(shapes):
        flat = FlatRange(number % 2, math.prod(shape))
        layouts.append(ParameterLayout(f"{number}", "", shape, None, Axis(0, 1), flat, replica))
    return [plan_parameter(layout, None) for layout in layouts]


shapes = st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6)


@example([(1,), (149, 223), (2, 149, 223)], 2, [2] * 6)
@given(shapes, st.integers(2, 9), st.lists(st.sampled_from([2, 10, 12, 16]), min_size=6, max_size=6))
def test_each_element_is_written_once_and_nobody_writes_more(
    shapes: list[Shape], ranks: int, bytes_per_element: list[int]
) -> None:
    sizes = bytes_per_element[: len(shapes)]
    shared = [shared_out(plans(shapes, Axis(rank, ranks)), sizes) for rank in range(ranks)]
    held = [blocks_of(of_rank) for of_rank in shared]
    assert held == [held[0]] * ranks, "all are cut alike"
    writes = [blocks_of(of_rank, written=True) for of_rank in shared]
    assert sorted(itertools.chain(*writes)) == sorted(held[0])

    written = [sum(math.prod(size) * sizes[number] for number, _, size in blocks) for blocks in writes]
    writers = min(ranks, max(1, sum(written) // (2 * SLIVER)))
    whole = blocks_of(plans(shapes, Axis(0, ranks)))  # what is cut between rows has less of them
    row = max(math.prod(size) // next((n for n in size if n > 1), 1) * sizes[number] for number, _, size in whole)
    assert max(written) <= sum(written) / writers + 2 * SLIVER + row


def blocks_of(plans: list[ParameterPlan], *, written: bool = False) -> list[tuple[int, Shape, Shape]]:
    """The parameters' blocks: number, offset and size; only those that are written."""
    numbered = ((number, slice_) for number, plan in enumerate(plans) for slice_ in plan.slices)
    return [(number, slice_.box.offset, slice_.box.size) for number, slice_ in numbered if slice_.writes or not written]


def test_little_is_written_by_few_that_lie_apart() -> None:
    assert Line(4 * SLIVER, 8).writers == 2
    assert [Line(4 * SLIVER, 8).writer_of(part) for part in range(2)] == [0, 4]
    assert list(Line(0, 8).parts(0, 0, 1)) == [Part(0, 0, 1)]


def test_a_later_stages_copy_is_shared_out_to_nobody() -> None:
    of = ParameterLayout("key", "", (8, 2), None, Axis(0, 1), FlatRange(0, 16), Axis(0, 2), is_copy=True)
    (plan,) = shared_out([plan_parameter(of, None)], [4 * SLIVER])
    assert [slice_.writes for slice_ in plan.slices] == [False]


@pytest.mark.parametrize(
    ("replica", "is_copy", "expected"),
    [
        pytest.param(Axis(1, 2), False, [(0, 4, 0), (4, 4, 1)], id="two ranks hold it"),
        pytest.param(Axis(0, 1), False, [(0, 8, 0)], id="one rank holds it"),
        pytest.param(Axis(1, 2), True, [(0, 8, None)], id="another stage writes it"),
    ],
)
def test_each_rank_knows_who_writes_what_it_holds(
    replica: Axis, is_copy: bool, expected: list[tuple[int, int, int | None]]
) -> None:
    of = ParameterLayout("key", "", (8, 2), None, Axis(0, 1), FlatRange(0, 16), replica, is_copy=is_copy)
    (found,) = divide([(of, plan_parameter(of, None).slices)], [4 * SLIVER])
    assert [(slice_.box.offset[0], slice_.box.size[0], writer) for slice_, writer in found] == expected
