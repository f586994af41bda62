# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Which boxes a rank of a device mesh holds: tables, and what torch itself cuts, element by element."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from mbridge_fsdp_ckpt.plan.boxes import Box, FlatRange, Shape, whole
from mbridge_fsdp_ckpt.plan.layout import Axis, ParameterLayout
from mbridge_fsdp_ckpt.plan.mesh_cuts import Cut, boxes_held
from mbridge_fsdp_ckpt.plan.slices import plan_parameter

SIZES = st.integers(1, 4)


def rows(size: int, cuts: list[Cut]) -> list[int]:
    """The rows that a rank holds of a tensor of one dimension, in the order of its local tensor."""
    held = boxes_held((size,), cuts)
    found = [-1] * math.prod(held.shape)
    for box, inner in held.boxes:
        found[inner.offset[0] : inner.end[0]] = range(box.offset[0], box.end[0])
    return found


@pytest.mark.parametrize(
    ("size", "cuts", "expected"),
    [
        pytest.param(5, [], [0, 1, 2, 3, 4], id="whole"),
        pytest.param(5, [Cut(0, 1, 2)], [3, 4], id="shorter"),
        pytest.param(5, [Cut(0, 3, 4)], [], id="empty"),
        pytest.param(8, [Cut(0, 1, 2), Cut(0, 0, 2)], [4, 5], id="from left to right"),
        pytest.param(8, [Cut(0, 1, 2, 2), Cut(0, 0, 2)], [2, 3], id="tensor parallelism first"),
        pytest.param(8, [Cut(0, 0, 2, 2)], [0, 1, 4, 5], id="two boxes"),
        pytest.param(7, [Cut(0, 2, 3, 2), Cut(0, 1, 2)], [6], id="where torch tells of another rank"),
        pytest.param(7, [Cut(0, 2, 3, 2), Cut(0, 0, 2)], [], id="to which it gives the row"),
        pytest.param(16, [Cut(0, 1, 2, 4), Cut(0, 1, 2), Cut(0, 0, 2)], [10, 11], id="two that cut first"),
    ],
)
def test_rows_of_a_rank(size: int, cuts: list[Cut], expected: list[int]) -> None:
    assert rows(size, cuts) == expected


def chunk(tensor: torch.Tensor, dim: int, index: int, count: int) -> torch.Tensor:
    """What `torch.chunk` gives, and nothing where it gives fewer."""
    parts = tensor.chunk(count, dim)
    return parts[index] if index < len(parts) else tensor.narrow(dim, 0, 0)


@given(
    shape=st.tuples(st.integers(0, 13), st.integers(1, 9)),
    mesh=st.tuples(SIZES, SIZES, SIZES),
    dims=st.tuples(*[st.sampled_from([None, 0, 1])] * 3),
    split=st.tuples(*[st.sampled_from([1, 1, 2, 3])] * 3),
)
def test_what_torch_cuts_from_left_to_right(
    shape: Shape, mesh: Shape, dims: tuple[int | None, ...], split: Shape
) -> None:
    """The oracle are the placements' own functions, which cut real tensors."""
    whole_tensor = torch.arange(math.prod(shape)).view(shape)
    for place in product(*map(range, mesh)):
        cuts = [
            Cut(dim, at, count, factor)
            for dim, at, count, factor in zip(dims, place, mesh, split, strict=True)
            if dim is not None
        ]
        if any(
            cut.split == math.prod(c.places for c in cuts[n + 1 :] if c.dim == cut.dim) for n, cut in enumerate(cuts)
        ):
            continue  # FSDP2's, see below
        local = whole_tensor
        for cut in cuts:
            placement: Any = Shard(cut.dim) if cut.split == 1 else _StridedShard(cut.dim, split_factor=cut.split)
            local = placement._split_tensor(local, cut.places, with_padding=False)[0][cut.place]
        check(shape, cuts, local)


@given(
    shape=st.tuples(st.integers(0, 23), st.integers(1, 5)),
    data=SIZES,
    others=st.lists(SIZES, min_size=1, max_size=2),
)
def test_what_fsdp2_cuts_of_a_tensor_that_was_cut_before(shape: Shape, data: int, others: list[int]) -> None:
    """The oracle is what `fully_shard` does: it takes a chunk of the local tensor that it finds."""
    whole_tensor = torch.arange(math.prod(shape)).view(shape)
    for place in product(range(data), *map(range, others)):
        local = whole_tensor
        for at, count in zip(place[1:], others, strict=True):
            local = chunk(local, 0, at, count)
        local = chunk(local, 0, place[0], data)
        inner = [Cut(0, at, count) for at, count in zip(place[1:], others, strict=True)]
        check(shape, [Cut(0, place[0], data, math.prod(others)), *inner], local)


def check(shape: Shape, cuts: list[Cut], local: torch.Tensor) -> None:
    """The boxes hold what torch cut, where it lies; so do the slices of a plan."""
    held, numbers = boxes_held(shape, cuts), torch.arange(math.prod(shape)).view(shape)
    assert held.shape == tuple(local.shape)
    found = torch.full(held.shape, -1)
    for box, inner in held.boxes:
        found[inner.slices_in(whole(held.shape))] = numbers[box.slices_in(whole(shape))]
    assert torch.equal(found, local)
    layout = ParameterLayout("key", "key", shape, None, Axis(0, 1), FlatRange(0, 0), Axis(0, 1), box_set=held)
    slices = plan_parameter(layout, None).slices
    assert sum(slice_.box.volume for slice_ in slices) == local.numel()
    for slice_ in slices:
        if slice_.box.volume:
            assert torch.equal(slice_.block(local.reshape(-1)), numbers[slice_.box.slices_in(whole(shape))])


def test_an_empty_shard_has_the_parameters_numbers() -> None:
    (box_set, *_) = [boxes_held((2, 3), [Cut(0, 2, 3)])]
    layout = ParameterLayout("key", "key", (2, 3), None, Axis(0, 1), FlatRange(0, 0), Axis(0, 1), box_set=box_set)
    (slice_,) = plan_parameter(layout, None).slices
    assert (slice_.box, slice_.writes, slice_.is_origin, slice_.has_elements) == (
        Box((0, 0), (0, 0)),
        *(False, False, False),
    )
