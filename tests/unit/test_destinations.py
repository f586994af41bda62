# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A destination is a view of live memory, or it is refused."""

from __future__ import annotations

import pytest
import torch

from mbridge_fsdp_ckpt.errors import InternalError, UnsupportedStateError
from mbridge_fsdp_ckpt.families import Claim, Segment
from mbridge_fsdp_ckpt.loading.destinations import block, scalar
from mbridge_fsdp_ckpt.plan.boxes import Box, FlatRange, Shape, whole
from mbridge_fsdp_ckpt.plan.layout import Axis, ParameterLayout
from mbridge_fsdp_ckpt.plan.slices import Slice, plan_parameter

FUSED = Claim("family", 1, (Segment("_w", 2), Segment("_v", 2)))


def slices(shape: Shape, start: int, stop: int, claim: Claim | None = None) -> tuple[Slice, ...]:
    layout = ParameterLayout("weight", "weight", shape, None, Axis(0, 1), FlatRange(start, stop), Axis(0, 1))
    return plan_parameter(layout, claim).slices


def numbered(shape: Shape) -> torch.Tensor:
    return torch.arange(whole(shape).volume, dtype=torch.float32).view(shape)


@pytest.mark.parametrize("strides", ["contiguous", "transposed"])
def test_chunks_reach_the_live_tensor_and_are_counted_there(strides: str) -> None:
    live = torch.zeros(4, 3) if strides == "contiguous" else torch.zeros(3, 4).t()
    (slice_,), values = slices((4, 3), 0, 12), numbered((4, 3))
    destination = block(slice_, live, "k")
    assert destination.take(Box((1, 0), (3, 2)), values[1:, :2]) == 6
    assert torch.equal(live[1:, :2], values[1:, :2])
    assert live.count_nonzero() == 6
    assert destination.take(Box((4, 0), (1, 3)), values[:1]) == 0


@pytest.mark.parametrize(
    ("chunk", "start"),
    [
        (Box((0, 0), (4, 3)), 12),
        (Box((1, 0), (2, 3)), 0),
        (Box((2, 0), (2, 3)), 0),
        (Box((2, 0), (2, 2)), 0),
        (Box((1, 0), (2, 2)), None),
        (Box((2, 1), (1, 2)), 0),
        (Box((3, 0), (1, 3)), None),
    ],
    ids=str,
)
def test_where_a_chunk_goes_as_it_is(chunk: Box, start: int | None) -> None:
    """What the chunk has of rows 1 and 2 is one run of both, or it has to be copied element by element."""
    live, values = torch.zeros(2, 3), numbered((4, 3))
    (slice_,) = slices((4, 3), 3, 9)
    destination = block(slice_, live, "k")
    place = destination.place_in(chunk, torch.float32)
    if start is None:
        assert place is None
        return
    assert place is not None
    assert place.start == start
    data = values[chunk.slices_in(whole((4, 3)))].contiguous()
    place.memory[:] = data.view(-1).view(torch.uint8).numpy()[start : start + place.memory.size]
    by_copy = torch.zeros(2, 3)
    block(slice_, by_copy, "k").take(chunk, data)
    assert torch.equal(live, by_copy)
    assert live.any()


def test_what_has_to_be_converted_or_scattered_goes_nowhere_as_it_is() -> None:
    (slice_,), chunk = slices((4, 3), 0, 12), Box((0, 0), (4, 3))
    assert block(slice_, torch.zeros(4, 3), "k").place_in(chunk, torch.bfloat16) is None
    assert block(slice_, torch.zeros(3, 4).t(), "k").place_in(chunk, torch.float32) is None
    assert block(slice_, torch.zeros(4, 3, device="meta"), "k").place_in(chunk, torch.float32) is None


def test_one_element_is_one_run_whatever_its_stride() -> None:
    (slice_,), base = slices((1,), 0, 1), torch.zeros(8)
    place = block(slice_, base[3::8], "k").place_in(Box((0,), (1,)), torch.float32)
    assert place is not None
    place.memory[:] = torch.ones(1).view(torch.uint8).numpy()
    assert base.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]


def test_both_halves_of_a_fused_shard_lie_in_it() -> None:
    shard = torch.zeros(2, 3)
    gate, up = (block(slice_, shard, "k") for slice_ in slices((4, 3), 3, 9, FUSED))
    assert gate.take(Box((0, 0), (2, 3)), numbered((2, 3))) == 3
    assert up.take(Box((0, 0), (2, 3)), numbered((2, 3)) + 10) == 3
    assert shard.tolist() == [[3, 4, 5], [10, 11, 12]]


def test_a_scalar() -> None:
    live = torch.zeros(())
    assert scalar(live).take(Box((), ()), torch.tensor(3.0)) == 1
    assert live == 3


@pytest.mark.parametrize(
    ("shape", "strides", "is_refused"),
    [
        ((5, 6), (0, 1), True),
        ((5, 6), (6, 0), True),
        ((5, 4), (2, 1), True),
        ((2, 2, 2), (1, 3, 3), True),
        ((5, 6), (1, 5), False),
        ((5, 6), (100, 7), False),
        ((1, 6), (0, 1), False),
        ((5, 1), (2, 0), False),
        ((), (), False),
    ],
)
def test_elements_that_share_memory_are_refused(shape: Shape, strides: Shape, is_refused: bool) -> None:
    live = torch.zeros(600).as_strided(shape, strides)
    (slice_,) = slices(shape, 0, whole(shape).volume)
    if is_refused:
        with pytest.raises(UnsupportedStateError, match="elements that share memory"):
            block(slice_, live, "k")
    else:
        assert block(slice_, live, "k").take(whole(shape), torch.ones(shape)) == live.sum() == live.numel()


def test_a_piece_that_is_no_view_of_its_shard_is_refused() -> None:
    slice_, _ = slices((4, 3), 0, 12, FUSED)
    with pytest.raises(InternalError, match="to be a view"):
        block(slice_, torch.zeros(3, 4).t(), "k")
