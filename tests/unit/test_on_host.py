# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Tensors' bytes on the host: whatever their sizes, each one's own, in order, and few fetches of a device."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mbridge_fsdp_ckpt.io import host_bytes as on_host
from mbridge_fsdp_ckpt.io.host_bytes import fetched, host_bytes, host_pieces, pieces_of
from mbridge_fsdp_ckpt.io.ranges import Scratch
from testing import cpu_cuda
from tests.unit.elements import DTYPES, expected_bytes, pattern

PIECE, SMALL = 256, 64


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes of what is fetched, in bytes; a piece of 4 MiB is 256 here.  A stand-in for CUDA copies as a device."""
    sizes: list[int] = []

    fetch = on_host._fetch

    def noted(elements: torch.Tensor) -> Any:
        sizes.append(elements.nbytes)
        return host_bytes(elements)

    def landed(piece: torch.Tensor, scratch: Scratch) -> Any:
        sizes.append(piece.nbytes)
        return fetch(piece, scratch)

    monkeypatch.setattr(on_host, "_PIECE", PIECE)
    monkeypatch.setattr(on_host, "_SMALL", SMALL)
    monkeypatch.setattr(on_host, "host_bytes", noted)
    monkeypatch.setattr(on_host, "_fetch", landed)
    with cpu_cuda.install():
        yield sizes


def joined(pieces: Any) -> bytes:
    return b"".join(map(bytes, pieces))


def test_host_memory_is_shared_not_copied() -> None:
    tensor = torch.zeros(4)
    host_bytes(tensor)[:] = np.frombuffer(np.array([1, 2, 3, 4], np.float32).tobytes(), np.uint8)
    assert tensor.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.uint8])
def test_of_a_device_one_piece_at_a_time_is_on_the_host(dtype: torch.dtype, fetches: list[int]) -> None:
    fits = PIECE // dtype.itemsize
    for tensor in [pattern(dtype, count) for count in (0, 1, fits, fits + 1, 1000)]:
        assert joined(host_pieces(tensor.cuda())) == expected_bytes(tensor)
    assert max(fetches) == PIECE


def test_small_ones_of_a_device_are_fetched_together(fetches: list[int]) -> None:
    tensors = [pattern(DTYPES[number % len(DTYPES)], 8) for number in range(100)]
    assert list(map(joined, pieces_of(tensor.cuda() for tensor in tensors))) == list(map(expected_bytes, tensors))
    assert sum(fetches) == sum(tensor.nbytes for tensor in tensors)
    assert max(fetches) <= PIECE
    assert len(fetches) < sum(fetches) / PIECE * 1.5


def test_of_large_ones_nothing_is_fetched_ahead(fetches: list[int]) -> None:
    """Memory of the host is bounded by a piece, and what is small and came before is not held up."""
    tensors = [pattern(torch.uint8, count).cuda() for count in (8, 1000, 8, 8, PIECE, SMALL, SMALL + 1)]
    taken = [(joined(pieces), list(fetches)) for pieces in pieces_of(tensors)]
    assert [data for data, _ in taken] == list(map(expected_bytes, tensors))
    assert fetches == [8, 256, 256, 256, 232, 16, 256, 64, 65]
    assert taken[0][1] == [8]
    assert taken[2][1] == fetches[:6]


def test_pieces_of_a_device_land_in_the_same_memory(fetches: list[int]) -> None:
    """Whatever tensor they are of: the allocator would keep memory for several."""
    tensors = [pattern(dtype, 1000).cuda() for dtype in (torch.bfloat16, torch.float32, torch.uint8)]
    kept = [np.asarray(piece) for pieces in pieces_of(tensors) for piece in pieces]
    assert len(kept) == len(fetches) > len(tensors)
    assert {piece.ctypes.data for piece in kept} == {kept[0].ctypes.data}


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.integers(0, 400), st.sampled_from(["row", "column", "alone", "grad"]))
    )
)
def test_whatever_there_is_each_tensor_gets_its_own_bytes(kinds: list[tuple[torch.dtype, int, str]]) -> None:
    tensors = []
    for dtype, count, kind in kinds:
        tensor = pattern(dtype, 2 * count)
        step = {"column": 2, "alone": max(1, 2 * count)}.get(kind)
        tensor = tensor[:count].reshape(1, count) if step is None else tensor[::step]
        tensors.append(tensor.requires_grad_() if kind == "grad" and dtype.is_floating_point else tensor)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(on_host, "_PIECE", PIECE)
        patches.setattr(on_host, "_SMALL", SMALL)
        assert list(map(joined, pieces_of(tensors))) == [expected_bytes(tensor.detach()) for tensor in tensors]


def test_numbers_of_all_dtypes_are_fetched_together_and_stay_in_their_order(fetches: list[int]) -> None:
    numbers = [pattern(dtype, 3)[number].reshape(shape) for number in range(3) for dtype in DTYPES for shape in ((), 1)]
    assert list(map(bytes, fetched([number.cuda() for number in numbers]))) == list(map(expected_bytes, numbers))
    assert len(fetches) == 1
    assert fetched([]) == []
