# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""How blocks are cut into records: literal tables, and properties against NumPy indexing."""

import math
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mbridge_fsdp_ckpt.plan import records as plan_records
from mbridge_fsdp_ckpt.plan.boxes import Box, Shape, whole
from mbridge_fsdp_ckpt.plan.records import LARGEST_RECORD, Part, part_of, records_of


@pytest.mark.parametrize(
    ("box", "itemsize", "largest", "expected"),
    [
        (Box((), ()), 4, 1, [((), ())]),
        (Box((7,), (0,)), 4, 8, [((7,), (0,))]),
        (Box((3, 0), (5, 4)), 1, 20, [((3, 0), (5, 4))]),
        (Box((3, 0), (5, 4)), 1, 8, [((3, 0), (1, 4)), ((4, 0), (2, 4)), ((6, 0), (2, 4))]),
        (Box((3, 0), (5, 4)), 2, 8, [((3 + row, 0), (1, 4)) for row in range(5)]),
        (Box((0, 6), (1, 9)), 2, 8, [((0, 6), (1, 3)), ((0, 9), (1, 3)), ((0, 12), (1, 3))]),
        (
            Box((1, 2, 0), (2, 3, 8)),
            1,
            16,
            [
                ((1, 2, 0), (1, 1, 8)),
                ((1, 3, 0), (1, 2, 8)),
                ((2, 2, 0), (1, 1, 8)),
                ((2, 3, 0), (1, 2, 8)),
            ],
        ),
        (Box((5,), (2,)), 8, 1, [((5,), (1,)), ((6,), (1,))]),
    ],
)
def test_blocks_and_their_records(box: Box, itemsize: int, largest: int, expected: list[tuple[Shape, Shape]]) -> None:
    assert [(record.offset, record.size) for record in records_of(box, itemsize, largest)] == expected


BOXES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=4).map(
    lambda dims: Box(tuple(offset for offset, _ in dims), tuple(size for _, size in dims))
)


@given(box=BOXES, itemsize=st.sampled_from([1, 2, 4, 8]), largest=st.integers(1, 300))
def test_records_are_runs_of_the_block_one_after_the_other(box: Box, itemsize: int, largest: int) -> None:
    numbers = np.arange(math.prod(box.size)).reshape(box.size)
    records = list(records_of(box, itemsize, largest))
    runs = [numbers[record.slices_in(box)].reshape(-1).tolist() for record in records]
    assert [number for run in runs for number in run] == list(range(box.volume))
    sizes = [len(run) * itemsize for run in runs]
    assert max(sizes) <= max(largest, itemsize)
    if len(sizes) > 1:
        assert min(sizes) * 3 >= max(sizes), "none is a sliver"


def test_no_record_is_larger_than_the_largest_and_few_are_small() -> None:
    """A matrix of 8192 x 28672 in fp32, as one rank of eight holds it: 117 MB."""
    records = list(records_of(whole((1024, 28672)), 4))
    sizes = [record.volume * 4 for record in records]
    assert sum(sizes) == 1024 * 28672 * 4
    assert LARGEST_RECORD / 2 < min(sizes) <= max(sizes) <= LARGEST_RECORD


MATRIX = Box((10, 0), (5, 4))
"""Of 2 bytes an element: 8 a row, 40 in all; in blocks of 16, 0 to 16, to 32, to 40."""


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([MATRIX], None),
        ([whole((20, 4))], None),
        ([Box((0, 0), (10, 4))], None),
        ([Box((10, 0), (1, 4)), Box((14, 0), (1, 4))], None),
        ([Box((0, 0), (11, 4))], Part(Box((10, 0), (1, 4)), 0, 16, 0)),
        ([Box((11, 3), (2, 1))], Part(Box((11, 0), (2, 4)), 0, 32, 8)),
        ([Box((13, 0), (1, 4))], Part(Box((13, 0), (1, 4)), 16, 32, 8)),
        ([Box((14, 2), (9, 1)), Box((90, 0), (1, 4))], Part(Box((14, 0), (1, 4)), 32, 40, 0)),
    ],
)
def test_records_and_what_is_read_of_them(wanted: list[Box], expected: Part | None) -> None:
    with patch.object(plan_records, "HASHED_BLOCK", 16):
        assert part_of(MATRIX, 2, wanted) == expected


@given(record=BOXES, itemsize=st.sampled_from([1, 2, 4, 8]), block=st.integers(1, 40), data=st.data())
def test_what_is_read_of_a_record_has_what_is_wanted_and_little_besides(
    record: Box, itemsize: int, block: int, data: st.DataObject
) -> None:
    wanted = data.draw(st.lists(st.tuples(*(st.tuples(st.integers(0, 9), st.integers(1, 9)) for _ in record.size))))
    boxes = [Box(tuple(o for o, _ in dims), tuple(n for _, n in dims)) for dims in wanted]
    with patch.object(plan_records, "HASHED_BLOCK", block):
        part = part_of(record, itemsize, boxes)
    numbers = np.arange(record.volume).reshape(record.size)
    met = [number for box in boxes if (c := record.intersect(box)) for number in numbers[c.slices_in(record)].flat]
    size = record.volume * itemsize
    if part is None:
        row = size // next((extent for extent in record.size if extent > 1), 1)
        assert size <= block or not met or size - (max(met) - min(met) + 1) * itemsize < 2 * (row + block)
        return
    run = numbers[part.box.slices_in(record)].reshape(-1).tolist()
    assert run == list(range(run[0], run[-1] + 1))
    assert set(met) <= set(run)
    assert part.begin + part.skipped == run[0] * itemsize
    assert part.begin % block == 0
    assert part.skipped < block
    assert part.end % block == 0 or part.end == size
    assert 0 <= part.end - (run[-1] + 1) * itemsize < block
    assert (part.begin, part.end) != (0, size)
