# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Who reads what for whom, and in which blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mbridge_fsdp_ckpt.format.source import StoredChunk
from mbridge_fsdp_ckpt.io.store import as_path
from mbridge_fsdp_ckpt.loading.sharing import SharedBlock, blocks, readers, reads_are_shared, rounds
from mbridge_fsdp_ckpt.plan.boxes import Box, whole
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.plan.tiling import tiling_defect
from mbridge_fsdp_ckpt.settings import Settings


@pytest.mark.parametrize(
    ("lengths", "count", "found"),
    [
        ([], 2, []),
        ([0, 0], 2, [0, 0]),
        ([3, 3, 6, 2, 6], 2, [0, 0, 0, 1, 1]),
        ([5, 5, 5, 5], 4, [0, 1, 2, 3]),
        ([100], 4, [2]),
        ([1, 100, 1], 4, [0, 2, 3]),
        ([7, 0], 3, [1, 2]),
    ],
)
def test_neighbours_go_to_one_reader(lengths: list[int], count: int, found: list[int]) -> None:
    assert readers(lengths, count) == found


@pytest.mark.parametrize("count", [2, 3, 64])
def test_readers_get_the_same_up_to_the_largest_chunk(count: int) -> None:
    lengths = [(number * 7919) % 1000 + 1 for number in range(2000)]
    shares = [0] * count
    for length, reader in zip(lengths, readers(lengths, count), strict=True):
        shares[reader] += length
    assert max(shares) - min(shares) <= 2 * max(lengths)


def checkpoint(shape: tuple[int, ...], chunk: Box, *needed: Box) -> tuple[Any, StoredChunk]:
    """As much of an opened checkpoint as blocks are made of."""
    keys = {"k": KeyEntry(dtype="float32", shape=shape)}
    metadata = SimpleNamespace(keys=keys)
    return SimpleNamespace(source=SimpleNamespace(metadata=metadata), needed={"k": list(needed)}), StoredChunk(
        "k", chunk, as_path("/c/a")
    )


def test_slices_are_whole_rows_of_what_is_needed() -> None:
    opened, chunk = checkpoint((8, 4), Box((2, 0), (6, 4)), Box((0, 0), (7, 3)))
    found = [item.box for item in blocks(opened, [chunk], 4 * 7)]
    assert found == [Box((2, 0), (2, 3)), Box((4, 0), (2, 3)), Box((6, 0), (1, 3))]


@pytest.mark.parametrize("limit", [16, 20, 48, 100, 4096])
@pytest.mark.parametrize("box", [Box((1, 2, 0), (3, 5, 7)), Box((4,), (9,)), Box((), ())])
def test_slices_tile_what_is_needed_and_none_is_larger_than_allowed(box: Box, limit: int) -> None:
    shape = tuple(offset + size + 1 for offset, size in zip(box.offset, box.size, strict=True))
    opened, chunk = checkpoint(shape, whole(shape), box)
    found = list(blocks(opened, [chunk], limit))
    assert tiling_defect(box, (item.box for item in found)) == ""
    assert max(item.length for item in found) <= limit


def test_rounds_keep_the_order_and_the_limit() -> None:
    def item(elements: int) -> SharedBlock:
        return SharedBlock(StoredChunk("k", Box((0,), (99,)), as_path("/c/a")), Box((0,), (elements,)), torch.uint8)

    a, b, c, d = map(item, (16, 17, 5, 64))
    assert [p.room for p in (a, b, c, d)] == [16, 32, 16, 64]
    assert rounds([[a, b, c], [d], []], 64) == [[[a, b, c], [d], []]]
    assert rounds([[a, b, c], [d, a], []], 48) == [[[a, b], [d], []], [[c], [a], []]]
    assert rounds([[], []], 48) == []


@pytest.mark.parametrize(
    ("choice", "place", "environment", "shared"),
    [
        ("auto", "memory://bucket/iter_1", {}, True),
        ("auto", "/scratch/iter_1", {}, False),
        ("auto", "/scratch/iter_1", {"LOCAL_WORLD_SIZE": "8"}, False),
        ("auto", "/scratch/iter_1", {"LOCAL_WORLD_SIZE": "4"}, True),
        ("auto", "/scratch/iter_1", {"LOCAL_WORLD_SIZE": "8", "SLURM_NNODES": "2"}, False),
        ("auto", "/scratch/iter_1", {"SLURM_NNODES": "2"}, True),
        ("always", "/scratch/iter_1", {}, True),
        ("never", "memory://bucket/iter_1", {"SLURM_NNODES": "2"}, False),
    ],
)
def test_when_reads_are_shared(
    choice: Any, place: str, environment: dict[str, str], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert not reads_are_shared(Settings(share_reads=choice), as_path(place)), "a single rank"
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    assert reads_are_shared(Settings(share_reads=choice), as_path(place)) is shared
