# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Tensors' bytes on the host, of tensors on any device: a few MiB at a time, and small ones together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from mbridge_fsdp_ckpt.io.ranges import Bytes, Scratch
from mbridge_fsdp_ckpt.plan.boxes import Box

_PIECE = 1 << 22  # bytes that are fetched from a device at once
_SMALL = 1 << 16  # bytes that take longer to ask for, one by one, than to copy once more


def pieces_of(tensors: Iterable[torch.Tensor]) -> Iterator[Iterable[Bytes]]:
    """The bytes of each tensor, one piece after the other; small neighbours are fetched together, ahead.

    Args:
        tensors: Whose elements are wanted, row-major; all pieces of one are taken before the next one.  A piece of a
            device's tensor lasts until the next one is taken.
    """
    small: list[torch.Tensor] = []
    room, scratch = _PIECE, Scratch()
    for tensor in tensors:
        is_small = tensor.nbytes <= _SMALL
        if not is_small or tensor.nbytes > room:
            yield from ((data,) for data in fetched(small))
            small, room = [], _PIECE
        if is_small:
            small.append(tensor)
            room -= tensor.nbytes
        else:
            yield host_pieces(tensor, scratch)
    yield from ((data,) for data in fetched(small))


def fetched(small: Sequence[torch.Tensor]) -> list[Bytes]:
    """The bytes of each tensor.  Those of a device are fetched together: to ask takes long."""
    alike: dict[torch.device, list[int]] = defaultdict(list)
    for place, tensor in enumerate(small):
        alike[tensor.device].append(place)
    found = [np.empty(0, dtype=np.uint8)] * len(small)
    for places in alike.values():
        data = host_bytes(torch.cat([byte_row(small[place].detach().contiguous()) for place in places]))
        ends = np.cumsum([small[place].nbytes for place in places]).tolist()
        for place, end in zip(places, ends, strict=True):
            found[place] = data[end - small[place].nbytes : end]
    return found


def host_bytes(elements: torch.Tensor) -> Bytes:
    """A tensor's elements as bytes; shares memory where it lies on the host already."""
    return byte_row(elements.detach().cpu().contiguous()).numpy()


def elements(data: Bytes, dtype: torch.dtype, box: Box) -> torch.Tensor:
    """Raw bytes as a tensor shaped like a box."""
    if not data.size:
        return torch.empty(box.size, dtype=dtype)
    aligned = data if data.ctypes.data % dtype.itemsize == 0 else data.copy()
    return torch.from_numpy(aligned).view(dtype).reshape(box.size)


def byte_row(contiguous: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a row that shares its memory.

    One element alone is contiguous whatever its strides are; torch asks for strides of 1.
    """
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)


def host_pieces(elements: torch.Tensor, scratch: Scratch | None = None) -> Iterator[Bytes]:
    """A tensor's elements as bytes; of a device's, a few MiB at a time, each until the next one is taken.

    Args:
        elements: The tensor.
        scratch: Where pieces are fetched to, one after another: the allocator would keep several.
    """
    if not elements.is_cuda:
        yield host_bytes(elements)
        return
    flat, count, scratch = elements.detach().reshape(-1), _PIECE // elements.dtype.itemsize, scratch or Scratch()
    for start in range(0, flat.numel(), count):
        yield _fetch(flat[start : start + count], scratch)


def _fetch(piece: torch.Tensor, scratch: Scratch) -> Bytes:
    """The bytes of a one-dimensional tensor, in the scratch memory."""
    data = scratch.take(piece.nbytes)
    torch.from_numpy(data).view(piece.dtype).copy_(piece)
    return data
