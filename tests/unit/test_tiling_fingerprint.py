# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The fingerprint is zero over complete tilings, and over nothing else that ranks could come up with."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbridge_fsdp_ckpt.plan.boxes import Box, Shape, whole
from mbridge_fsdp_ckpt.plan.tiling import TilingFingerprint

PRIME = (1 << 61) - 1


def remainder(shape: Shape, boxes: list[Box], identity: str = "model.weight|float32") -> int:
    tiling = TilingFingerprint.of(identity, shape)
    return (sum(tiling.of_box(box) for box in boxes) - tiling.of_whole()) % PRIME


def rows(*numbers: int, width: int = 3) -> list[Box]:
    return [Box((number, 0), (1, width)) for number in numbers]


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((), [Box((), ())]),
        ((5,), [Box((0,), (2,)), Box((2,), (3,))]),
        ((4, 3), [Box((0, 0), (1, 3)), Box((3, 0), (1, 3)), Box((1, 0), (2, 1)), Box((1, 1), (2, 2))]),
        ((4, 3), rows(2, 0, 3, 1)),
        ((2, 2, 2), [Box((0, 0, 0), (2, 1, 2)), Box((0, 1, 0), (2, 1, 1)), Box((0, 1, 1), (2, 1, 1))]),
        ((0, 3), []),
        ((8192, 8192), [Box((0, 0), (4096, 8192)), Box((4096, 0), (4096, 8192))]),
    ],
)
def test_a_complete_tiling_leaves_nothing(shape: Shape, boxes: list[Box]) -> None:
    assert remainder(shape, boxes) == 0


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        pytest.param((), [], id="nobody writes a scalar"),
        pytest.param((), [Box((), ()), Box((), ())], id="two write a scalar"),
        pytest.param((4, 3), rows(0, 1, 3), id="a hole"),
        pytest.param((4, 3), rows(0, 1, 2, 2, 3), id="an overlap"),
        pytest.param((4, 3), rows(0, 1, 1, 3), id="a hole as large as the overlap"),
        pytest.param((4, 3), [*rows(0, 1, 2, width=3), Box((2, 0), (1, 3))], id="the last row is another's"),
        pytest.param((4, 4), [Box((0, 0), (2, 4)), Box((2, 0), (2, 2)), Box((2, 1), (2, 2))], id="shifted by a column"),
        pytest.param((4, 3), rows(0, 1, 2, 3, 4), id="a row beyond the end"),
        pytest.param((8192, 8192), [Box((0, 0), (4096, 8192))] * 2, id="half of a large tensor twice"),
    ],
)
def test_what_is_no_tiling_leaves_a_remainder(shape: Shape, boxes: list[Box]) -> None:
    assert remainder(shape, boxes) != 0


@pytest.mark.parametrize(
    ("lost", "twice"),
    [((0, 4, 5), (1, 2, 6)), ((1, 2, 4, 7), (0, 3, 5, 6)), ((0, 3, 5, 6), (1, 2, 4, 7))],
)
def test_rows_of_equal_sums_and_equal_squares_do_not_pass_for_each_other(
    lost: tuple[int, ...], twice: tuple[int, ...]
) -> None:
    """Seven or eight ranks, one row each, some of which believe to be others: no polynomial of low degree sees it."""
    held = [row for row in range(8) if row not in lost]
    assert remainder((8, 3), rows(*held, *twice)) != 0


@pytest.mark.parametrize(
    ("identity", "shape"),
    [("model.weight|bfloat16", (4, 6)), ("model.other|float32", (4, 6)), ("model.weight|float32", (4, 7))],
)
def test_ranks_that_disagree_on_the_tensor_leave_a_remainder(identity: str, shape: Shape) -> None:
    upper, lower = Box((0, 0), (2, 6)), Box((2, 0), (2, 6))
    mine, theirs = TilingFingerprint.of("model.weight|float32", (4, 6)), TilingFingerprint.of(identity, shape)
    assert (mine.of_box(upper) + theirs.of_box(lower) - mine.of_whole()) % PRIME != 0


def test_swapped_dimensions_are_another_tensor() -> None:
    square = Box((0, 0), (3, 3))
    assert TilingFingerprint.of("k", (3, 5)).of_box(square) != TilingFingerprint.of("k", (5, 3)).of_box(square)
    tiling = TilingFingerprint.of("k", (4, 4))
    assert tiling.of_box(Box((0, 0), (1, 2))) != tiling.of_box(Box((0, 0), (2, 1)))


@st.composite
def tilings(draw: st.DrawFn) -> tuple[Shape, list[Box]]:
    """Cut a tensor in two, and its parts again."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        boxes += cut(box, dim, draw(st.integers(0, box.size[dim])))
    return shape, draw(st.permutations(boxes))


def cut(box: Box, dim: int, at: int) -> list[Box]:
    before, after = list(box.size), list(box.size)
    before[dim], after[dim] = at, box.size[dim] - at
    behind = list(box.offset)
    behind[dim] += at
    return [part for part in (Box(box.offset, tuple(before)), Box(tuple(behind), tuple(after))) if part.volume]


@settings(deadline=None)
@given(tilings())
def test_any_tiling_of_any_shape_leaves_nothing(tiling: tuple[Shape, list[Box]]) -> None:
    assert remainder(*tiling) == 0


@settings(deadline=None)
@given(tilings(), st.data())
def test_any_lost_or_doubled_or_moved_box_is_seen(tiling: tuple[Shape, list[Box]], data: st.DataObject) -> None:
    shape, boxes = tiling
    chosen = data.draw(st.integers(0, len(boxes) - 1))
    others = boxes[:chosen] + boxes[chosen + 1 :]
    assert remainder(shape, others) != 0
    assert remainder(shape, [*boxes, boxes[chosen]]) != 0
    room = [n - size for n, size in zip(shape, boxes[chosen].size, strict=True)]
    offset = tuple(data.draw(st.integers(0, free)) for free in room)
    moved = Box(offset, boxes[chosen].size)
    assert (remainder(shape, [*others, moved]) == 0) is (offset == boxes[chosen].offset)


@st.composite
def heaps(draw: st.DrawFn) -> tuple[Shape, list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    boxes = []
    for _ in range(draw(st.integers(0, 5))):
        offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
        boxes.append(Box(offset, tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))))
    return shape, boxes


@settings(deadline=None, max_examples=200)
@given(heaps())
def test_the_remainder_says_what_counting_elements_says(heap: tuple[Shape, list[Box]]) -> None:
    shape, boxes = heap
    count = np.zeros(shape, int)
    for box in boxes:
        count[box.slices_in(whole(shape))] += 1
    assert (remainder(shape, boxes) == 0) is bool((count == 1).all())
