# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Where Megatron's `torch_dist` keeps what this format calls by its own keys.

Both cut a parameter into parts, by rules of their own.  Of a model that is not sharded, Megatron-Core describes the
parts of each parameter as views of it, and this package as blocks: what two parts have in common is a link.

    linear_fc1.weight (6, 3)      rows 0..2                             rows 3..5
    torch_dist                    (2 experts, 6, 3) at [1, 0..2, :]     at [1, 3..5, :]
    here                          linear_fc1.weight_w (3, 3)            linear_fc1.weight_v (3, 3)

Pure: tensors lend their strides only, and need no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mbridge_fsdp_ckpt.errors import UnsupportedStateError
from mbridge_fsdp_ckpt.plan.boxes import Box, Shape


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a parameter, and where another format has it.

    Args:
        block: The block, in the parameter.
        key: The other format's key.
        offset: Its first element there; leading dimensions that the parameter does not have come first.
        shape: The other's shape.
        padded: Whether the other may have more rows: those that pad a vocabulary.
    """

    block: Box
    key: str
    offset: Shape
    shape: Shape
    padded: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """Elements that two keys have in common.

    Args:
        here: The block, in this format's key.
        key: The other format's key.
        there: The block, in that key.
    """

    here: Box
    key: str
    there: Box


def parts_of(parameter: Any, described: Iterable[Any], name: str) -> list[Part]:
    """Megatron's parts of a parameter.

    Args:
        parameter: The parameter, or a buffer.
        described: Megatron-Core's `ShardedTensor`s, whose data are views of it.
        name: Its name, for the error.

    Raises:
        UnsupportedStateError: A part is no block of the parameter.
    """
    return [
        Part(
            block=block_of(tensor.data, parameter, name),
            key=tensor.key,
            offset=tuple(tensor.global_offset),
            shape=tuple(tensor.global_shape),
            padded=bool(tensor.allow_shape_mismatch),
        )
        for tensor in described
    ]


def block_of(view: Any, parameter: Any, name: str) -> Box:
    """Which block of a contiguous parameter a view is.

    Raises:
        UnsupportedStateError: It is none.
    """
    shape, size = tuple(parameter.shape), tuple(view.shape)
    strides = tuple(parameter.stride())
    rest, offset = view.storage_offset() - parameter.storage_offset(), []
    for stride, count in zip(strides, shape, strict=True):
        offset.append(rest // stride if stride and count else 0)
        rest -= offset[-1] * stride
    same = len(size) == len(shape) and all(
        n <= 1 or ours == theirs for n, ours, theirs in zip(size, strides, view.stride(), strict=True)
    )
    if not same or rest or not parameter.is_contiguous() or not Box(tuple(offset), size).inside(shape):
        raise UnsupportedStateError(
            expected="Megatron's parts of a parameter to be blocks of it",
            found=f"one of shape {list(size)} of {list(shape)}",
            remedy="Convert the weights through Hugging Face instead: export with Bridge, then convert import.",
            key=name,
        )
    return Box(tuple(offset), size)


def links(inner: Box, here: Box, parts: Iterable[Part]) -> Iterator[Link]:
    """What a block of a parameter has in common with the other format's parts.

    Args:
        inner: The block, in the parameter.
        here: The same block, in this format's key.
        parts: All parts of the parameter.
    """
    for part in parts:
        common = inner.intersect(part.block) if inner.size else inner
        if common is None:
            continue
        lead = len(part.offset) - len(common.offset)
        ours = _moved(common.offset, inner.offset, here.offset)
        theirs = _moved(common.offset, part.block.offset, part.offset[lead:])
        there = Box((*part.offset[:lead], *theirs), ((1,) * lead + common.size))
        yield Link(Box(ours, common.size), part.key, there)


def _moved(offset: Shape, origin: Shape, target: Shape) -> Shape:
    return tuple(o - base + new for o, base, new in zip(offset, origin, target, strict=True))
