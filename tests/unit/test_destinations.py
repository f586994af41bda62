"""A destination is a view of live memory, or it is refused."""

from __future__ import annotations

import pytest
import torch

from mbridge_fsdp_ckpt.errors import InternalError, UnsupportedStateError
from mbridge_fsdp_ckpt.families import Claim, Segment
from mbridge_fsdp_ckpt.loading.destinations import block, scalar
from mbridge_fsdp_ckpt.plan.boxes import Box, FlatRange, Shape, whole
from mbridge_fsdp_ckpt.plan.layout import Axis, ParameterLayout
from mbridge_fsdp_ckpt.plan.pieces import Piece, plan_parameter

FUSED = Claim("family", 1, (Segment("_w", 2), Segment("_v", 2)))


def pieces(shape: Shape, start: int, stop: int, claim: Claim | None = None) -> tuple[Piece, ...]:
    layout = ParameterLayout("weight", "weight", shape, None, Axis(0, 1), FlatRange(start, stop), Axis(0, 1))
    return plan_parameter(layout, claim).pieces


def numbered(shape: Shape) -> torch.Tensor:
    return torch.arange(whole(shape).volume, dtype=torch.float32).view(shape)


@pytest.mark.parametrize("strides", ["contiguous", "transposed"])
def test_chunks_reach_the_live_tensor_and_are_counted_there(strides: str) -> None:
    live = torch.zeros(4, 3) if strides == "contiguous" else torch.zeros(3, 4).t()
    (piece,), values = pieces((4, 3), 0, 12), numbered((4, 3))
    destination = block(piece, live, "k")
    assert destination.take(Box((1, 0), (3, 2)), values[1:, :2]) == 6
    assert torch.equal(live[1:, :2], values[1:, :2])
    assert live.count_nonzero() == 6
    assert destination.take(Box((4, 0), (1, 3)), values[:1]) == 0


def test_both_halves_of_a_fused_shard_lie_in_it() -> None:
    shard = torch.zeros(2, 3)
    gate, up = (block(piece, shard, "k") for piece in pieces((4, 3), 3, 9, FUSED))
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
    (piece,) = pieces(shape, 0, whole(shape).volume)
    if is_refused:
        with pytest.raises(UnsupportedStateError, match="elements that share memory"):
            block(piece, live, "k")
    else:
        assert block(piece, live, "k").take(whole(shape), torch.ones(shape)) == live.sum() == live.numel()


def test_a_piece_that_is_no_view_of_its_shard_is_refused() -> None:
    piece, _ = pieces((4, 3), 0, 12, FUSED)
    with pytest.raises(InternalError, match="to be a view"):
        block(piece, torch.zeros(3, 4).t(), "k")
