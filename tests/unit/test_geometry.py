# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Boxes, flat ranges and their splitting: literal tables, and properties against NumPy indexing."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbridge_fsdp_ckpt.plan.boxes import Box, FlatRange, Shape, boxes_of, whole
from mbridge_fsdp_ckpt.plan.tiling import tiling_defect

Split = list[tuple[Shape, Shape, int, int]]


@pytest.mark.parametrize(
    ("offset", "size"),
    [((0,), (1, 1)), ((0, 0), (1,)), ((), (1,)), ((-1,), (1,)), ((0,), (-1,)), ((0, -2), (0, 0))],
)
def test_a_box_with_unequal_ranks_or_negative_numbers_is_refused(offset: Shape, size: Shape) -> None:
    with pytest.raises(ValueError, match="a box"):
        Box(offset, size)


@pytest.mark.parametrize(
    ("box", "volume", "end"),
    [
        (Box((), ()), 1, ()),
        (Box((3,), (4,)), 4, (7,)),
        (Box((1, 2), (3, 5)), 15, (4, 7)),
        (Box((1, 2), (0, 5)), 0, (1, 7)),
    ],
)
def test_volume_and_end(box: Box, volume: int, end: Shape) -> None:
    assert (box.volume, box.end) == (volume, end)


@pytest.mark.parametrize(
    ("box", "shape", "inside"),
    [
        (Box((), ()), (), True),
        (Box((1, 0), (3, 2)), (4, 2), True),
        (Box((2, 0), (3, 2)), (4, 2), False),
        (Box((0, 1), (4, 2)), (4, 2), False),
        (Box((0, 0), (4, 2)), (4,), False),
        (Box((4, 0), (0, 2)), (4, 2), True),
        (Box((5, 0), (0, 2)), (4, 2), False),
        (Box((), ()), (1,), False),
    ],
)
def test_inside(box: Box, shape: Shape, inside: bool) -> None:
    assert box.inside(shape) is inside


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        (Box((0, 0), (4, 4)), Box((2, 1), (4, 2)), Box((2, 1), (2, 2))),
        (Box((0,), (3,)), Box((3,), (2,)), None),
        (Box((0,), (4,)), Box((3,), (2,)), Box((3,), (1,))),
        (Box((1, 1), (2, 2)), Box((0, 0), (9, 9)), Box((1, 1), (2, 2))),
        (Box((0, 0), (4, 4)), Box((0, 4), (4, 1)), None),
        (Box((0,), (0,)), Box((0,), (3,)), None),
        (Box((2, 1), (2, 2)), Box((2, 1), (2, 2)), Box((2, 1), (2, 2))),
        (Box((2, 1), (2, 0)), Box((2, 1), (2, 0)), None),
        (Box((), ()), Box((), ()), Box((), ())),
    ],
)
def test_intersection_of_boxes(one: Box, other: Box, common: Box | None) -> None:
    assert one.intersect(other) == common
    assert other.intersect(one) == common


@pytest.mark.parametrize(
    ("inner", "outer", "slices"),
    [
        (Box((2, 1), (2, 2)), Box((2, 0), (3, 4)), (slice(0, 2), slice(1, 3))),
        (Box((5,), (1,)), Box((1,), (8,)), (slice(4, 5),)),
        (Box((), ()), Box((), ()), ()),
    ],
)
def test_slices_in_an_outer_box(inner: Box, outer: Box, slices: tuple[slice, ...]) -> None:
    assert inner.slices_in(outer) == slices


@pytest.mark.parametrize(
    ("inner", "outer", "run"),
    [
        (Box((), ()), Box((), ()), FlatRange(0, 1)),
        (Box((2, 0), (2, 3)), Box((1, 0), (4, 3)), FlatRange(3, 9)),
        (Box((2, 1), (1, 2)), Box((1, 0), (4, 3)), FlatRange(4, 6)),
        (Box((2, 1), (2, 2)), Box((1, 0), (4, 3)), None),
        (Box((2, 1), (2, 1)), Box((1, 1), (4, 1)), FlatRange(1, 3)),
        (Box((0, 1, 0), (1, 2, 4)), Box((0, 0, 0), (2, 3, 4)), FlatRange(4, 12)),
        (Box((0, 1, 0), (2, 2, 4)), Box((0, 0, 0), (2, 3, 4)), None),
    ],
)
def test_a_box_is_one_run_of_an_outer_one_or_not(inner: Box, outer: Box, run: FlatRange | None) -> None:
    assert inner.run_in(outer) == run


@st.composite
def nested(draw: st.DrawFn) -> tuple[Box, Box]:
    ends = draw(st.lists(st.tuples(*[st.integers(0, 4)] * 4).map(sorted), max_size=4))
    low = [(outer, inner) for outer, inner, _, _ in ends]
    sizes = [(e + 1 - o, i + 1 - b) for o, b, i, e in ends]
    outer = Box(tuple(o for o, _ in low), tuple(size for size, _ in sizes))
    return Box(tuple(b for _, b in low), tuple(size for _, size in sizes)), outer


@given(nested())
def test_a_run_has_the_elements_that_numpy_takes(case: tuple[Box, Box]) -> None:
    inner, outer = case
    taken = np.arange(outer.volume).reshape(outer.size)[inner.slices_in(outer)].reshape(-1).tolist()
    run = inner.run_in(outer)
    assert (taken == list(range(taken[0], taken[0] + len(taken)))) == (run is not None)
    assert run is None or taken == list(range(run.start, run.stop))


@pytest.mark.parametrize(
    ("box", "other", "left"),
    [
        (Box((0, 0), (4, 3)), Box((0, 0), (2, 3)), [Box((2, 0), (2, 3))]),  # padding below the rows that were saved
        (Box((2, 0), (2, 3)), Box((0, 0), (2, 3)), [Box((2, 0), (2, 3))]),
        (Box((0, 0), (2, 3)), Box((0, 0), (4, 3)), []),
        (Box((0, 0), (4, 3)), None, [Box((0, 0), (4, 3))]),
        (
            Box((0, 0), (3, 3)),
            Box((1, 1), (1, 1)),
            [
                Box((0, 0), (1, 3)),
                Box((2, 0), (1, 3)),
                Box((1, 0), (1, 1)),
                Box((1, 2), (1, 1)),
            ],
        ),
        (Box((0,), (0,)), None, []),
    ],
)
def test_what_is_left_of_a_box_without_another(box: Box, other: Box | None, left: list[Box]) -> None:
    assert list(box.without(other)) == left


@given(st.data())
@settings(max_examples=200)
def test_a_box_without_another_has_each_other_element_once(data: st.DataObject) -> None:
    sides = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    one, other = (
        Box(tuple(b for b, _ in edges), tuple(e - b for b, e in edges))
        for edges in (
            [tuple(sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in sides] for _ in range(2)
        )
    )
    counted = np.zeros(sides, dtype=int)
    for part in one.without(other):
        counted[part.slices_in(whole(tuple(sides)))] += 1
    expected = np.zeros(sides, dtype=int)
    expected[one.slices_in(whole(tuple(sides)))] = 1
    expected[other.slices_in(whole(tuple(sides)))] = 0
    assert np.array_equal(counted, expected)


def test_whole_starts_at_the_origin() -> None:
    assert whole((2, 3)) == Box((0, 0), (2, 3))
    assert whole(()) == Box((), ())


@pytest.mark.parametrize(("start", "stop"), [(-1, 0), (3, 2), (-2, -1)])
def test_a_reversed_or_negative_flat_range_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="flat range"):
        FlatRange(start, stop)


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        (FlatRange(0, 5), FlatRange(3, 9), FlatRange(3, 5)),
        (FlatRange(0, 5), FlatRange(5, 9), None),
        (FlatRange(2, 2), FlatRange(0, 9), None),
        (FlatRange(1, 8), FlatRange(2, 4), FlatRange(2, 4)),
    ],
)
def test_intersection_of_flat_ranges(one: FlatRange, other: FlatRange, common: FlatRange | None) -> None:
    assert one.intersect(other) == common
    assert other.intersect(one) == common


def test_a_flat_range_has_a_length_and_can_be_shifted() -> None:
    assert len(FlatRange(3, 7)) == 4
    assert FlatRange(3, 7).shift(-3) == FlatRange(0, 4)
    with pytest.raises(ValueError, match="flat range"):
        FlatRange(3, 7).shift(-4)


@pytest.mark.parametrize(
    ("start", "stop", "shape", "expected"),
    [
        pytest.param(0, 12, (4, 3), [((0, 0), (4, 3), 0, 12)], id="all"),
        pytest.param(3, 9, (4, 3), [((1, 0), (2, 3), 3, 9)], id="whole rows"),
        pytest.param(2, 5, (7,), [((2,), (3,), 2, 5)], id="one dimension"),
        pytest.param(4, 5, (4, 3), [((1, 1), (1, 1), 4, 5)], id="inside a row"),
        pytest.param(1, 3, (4, 3), [((0, 1), (1, 2), 1, 3)], id="head only"),
        pytest.param(3, 5, (4, 3), [((1, 0), (1, 2), 3, 5)], id="tail only"),
        pytest.param(
            2, 4, (4, 3), [((0, 2), (1, 1), 2, 3), ((1, 0), (1, 1), 3, 4)], id="head and tail, nothing between"
        ),
        pytest.param(
            2,
            10,
            (4, 3),
            [((0, 2), (1, 1), 2, 3), ((1, 0), (2, 3), 3, 9), ((3, 0), (1, 1), 9, 10)],
            id="head, rows, tail",
        ),
        pytest.param(
            5,
            23,
            (2, 3, 4),
            [
                ((0, 1, 1), (1, 1, 3), 5, 8),
                ((0, 2, 0), (1, 1, 4), 8, 12),
                ((1, 0, 0), (1, 2, 4), 12, 20),
                ((1, 2, 0), (1, 1, 3), 20, 23),
            ],
            id="3-D, cut in the last dimension at both ends",
        ),
        pytest.param(
            3,
            10,
            (3, 2, 2),
            [((0, 1, 1), (1, 1, 1), 3, 4), ((1, 0, 0), (1, 2, 2), 4, 8), ((2, 0, 0), (1, 1, 2), 8, 10)],
            id="3-D, head, row, tail",
        ),
        pytest.param(4, 8, (2, 3, 4), [((0, 1, 0), (1, 1, 4), 4, 8)], id="3-D, one inner row"),
        pytest.param(0, 1, (), [((), (), 0, 1)], id="scalar"),
        pytest.param(5, 5, (4, 3), [], id="empty"),
        pytest.param(0, 0, (), [], id="empty of a scalar"),
        pytest.param(0, 0, (0, 3), [], id="no rows"),
        pytest.param(0, 0, (3, 0), [], id="no columns"),
    ],
)
def test_boxes_of_a_flat_range(start: int, stop: int, shape: Shape, expected: Split) -> None:
    found = [(b.offset, b.size, part.start, part.stop) for b, part in boxes_of(FlatRange(start, stop), shape)]
    assert found == expected


@pytest.mark.parametrize(("stop", "shape"), [(13, (4, 3)), (2, ()), (1, (0, 3)), (1, (3, 0)), (8, (7,))])
def test_a_flat_range_outside_the_tensor_is_refused(stop: int, shape: Shape) -> None:
    with pytest.raises(ValueError, match="outside"):
        list(boxes_of(FlatRange(0, stop), shape))


@st.composite
def ranges(draw: st.DrawFn) -> tuple[FlatRange, Shape]:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    ends = st.integers(0, math.prod(shape))
    start, stop = sorted((draw(ends), draw(ends)))
    return FlatRange(start, stop), shape


@settings(deadline=None)
@given(ranges())
def test_boxes_hold_every_element_of_the_range_once_and_in_order(case: tuple[FlatRange, Shape]) -> None:
    flat, shape = case
    numbers = np.arange(math.prod(shape)).reshape(shape)
    boxes = list(boxes_of(flat, shape))
    for box, part in boxes:
        assert numbers[box.slices_in(whole(shape))].ravel().tolist() == list(range(part.start, part.stop))
    edges = [flat.start, *(part.stop for _, part in boxes)]
    assert [(part.start, part.stop) for _, part in boxes] == list(pairwise(edges))
    assert edges[-1] == flat.stop


def fewest_boxes(flat: FlatRange, shape: Shape) -> int:
    """By trying every way to cut: a run of elements is a box if its bounding box has no more elements than it."""
    fewest = {flat.start: 0}
    for stop in range(flat.start + 1, flat.stop + 1):
        counts = []
        for start in range(flat.start, stop):
            corners = np.stack(np.unravel_index(np.arange(start, stop), shape))
            if np.prod(corners.max(1) - corners.min(1) + 1) == stop - start:
                counts.append(fewest[start] + 1)
        fewest[stop] = min(counts)
    return fewest[flat.stop]


@settings(deadline=None, max_examples=40)
@given(ranges().filter(lambda case: bool(case[1]) and math.prod(case[1]) <= 36))
def test_no_cut_into_fewer_boxes_exists(case: tuple[FlatRange, Shape]) -> None:
    flat, shape = case
    assert len(list(boxes_of(flat, shape))) == fewest_boxes(flat, shape)


@pytest.mark.parametrize(
    ("target", "boxes", "defect"),
    [
        (Box((0, 0), (4, 3)), [], "12 elements uncovered"),
        (Box((0, 0), (4, 3)), [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))], ""),
        (Box((1, 0), (2, 3)), [Box((0, 0), (2, 3))], "3 elements uncovered"),
        (Box((1, 0), (2, 3)), [Box((0, 0), (9, 9))], ""),
        (Box((0, 0), (4, 3)), [Box((9, 9), (2, 3))], "12 elements uncovered"),
        (Box((0,), (4,)), [Box((0,), (3,)), Box((1,), (3,))], "2 elements covered twice"),
        (
            Box((0, 0), (4, 3)),
            [Box((1, 0), (2, 3)), Box((2, 0), (2, 3))],
            "some elements uncovered, as many covered twice",
        ),
        (Box((), ()), [Box((), ())], ""),
        (Box((), ()), [], "1 elements uncovered"),
        (Box((), ()), [Box((), ()), Box((), ())], "1 elements covered twice"),
        (Box((0,), (0,)), [], ""),
    ],
)
def test_what_keeps_boxes_from_tiling_is_told(target: Box, boxes: list[Box], defect: str) -> None:
    assert tiling_defect(target, boxes) == defect
