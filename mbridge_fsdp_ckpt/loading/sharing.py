# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Which ranks read for each other, what each of them reads, and in which blocks: arithmetic, the same on each of them.

Ranks that hold copies of a shard want the same blocks of the same chunks.  They form a replica group, and the chunks,
in the order of the files, are cut into as many parts of about the same size:

    chunks    | a 3 | b 3 |   c 6   | d 2 |   e 6   |     20 bytes, two ranks
    reader       0     0       0       1       1
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mbridge_fsdp_ckpt.format.source import StoredChunk
from mbridge_fsdp_ckpt.io.store import AnyPath, is_local
from mbridge_fsdp_ckpt.live.readers.protocol import Ranks
from mbridge_fsdp_ckpt.loading.match import in_file_order
from mbridge_fsdp_ckpt.loading.opened import Opened
from mbridge_fsdp_ckpt.plan.boxes import Box, FlatRange, boxes_of
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name
from mbridge_fsdp_ckpt.plan.slices import Component, ParameterPlan
from mbridge_fsdp_ckpt.settings import Settings

LARGEST_GROUP = 64
"""Replica groups are capped at this many ranks, so that connections and buffers of a rank do not grow with the job."""

ALIGNED = 16
"""Bytes, the size of an element of the widest dtype."""


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """A block of a chunk, as one rank passes it on to the others.

    Args:
        chunk: The chunk.
        box: The block, in the global tensor.
        dtype: The dtype of the elements.
    """

    chunk: StoredChunk
    box: Box
    dtype: torch.dtype

    @property
    def length(self) -> int:
        """Bytes of the block."""
        return self.box.volume * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Bytes that the block takes in a batch, padded so that the next block is aligned."""
        return -(-self.length // ALIGNED) * ALIGNED


def reads_are_shared(settings: Settings, directory: AnyPath) -> bool:
    """Whether ranks read for each other; see `Settings.share_reads`."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    if settings.share_reads != "auto":
        return settings.share_reads == "always"
    return not is_local(directory) or _is_on_several_hosts(dist.get_world_size())


def _is_on_several_hosts(world_size: int) -> bool:
    """Whether the job runs on several hosts, by the variables of torchrun or SLURM; False where neither is set."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return world_size > int(os.environ["LOCAL_WORLD_SIZE"])
    return int(os.environ.get("SLURM_NNODES", "1")) > 1


class Sharing:
    """Which rank of each replica group reads which chunks.

    Args:
        opened: The checkpoint.
        rank: This rank.
        shared: Whether ranks read for each other at all.
    """

    def __init__(self, opened: Opened, rank: int, *, shared: bool) -> None:
        self._rank, self._needed = rank, opened.needed
        by_key = _groups(opened, rank) if shared else {}
        self.groups: dict[Ranks, list[StoredChunk]] = {}
        """What each replica group of this rank reads, in the order of the files."""
        for chunk in in_file_order(opened.chunks, {key: opened.needed[key] for key in by_key}):
            if chunk.record.length:  # the index has the others: everybody has them
                self.groups.setdefault(by_key[chunk.key], []).append(chunk)
        self._shared = {chunk for chunks in self.groups.values() for chunk in chunks}

    def is_shared(self, chunk: StoredChunk) -> bool:
        """Whether a replica group reads the chunk, and each of its ranks only a part."""
        return chunk in self._shared

    def plan(self, ranks: Ranks) -> str:
        """The chunks that a replica group reads and the blocks that it needs, as a text that its ranks compare."""
        chunks = self.groups[ranks]
        return "\n".join(f"{c.path.name} {c.record} {c.key} {c.box} {self._needed[c.key]}" for c in chunks)

    def parts(self, ranks: Ranks, keys: Collection[str]) -> list[list[StoredChunk]]:
        """The chunks of these keys that each rank of a replica group reads."""
        chunks = [chunk for chunk in self.groups[ranks] if chunk.key in keys]
        by_reader: list[list[StoredChunk]] = [[] for _ in ranks]
        for chunk, reader in zip(chunks, readers([c.record.length for c in chunks], len(ranks)), strict=True):
            by_reader[reader].append(chunk)
        return by_reader

    def own(self, keys: Collection[str]) -> list[StoredChunk]:
        """The chunks of these keys that this rank reads for its replica groups, one group after the other."""
        return [chunk for ranks in sorted(self.groups) for chunk in self.parts(ranks, keys)[ranks.index(self._rank)]]


def _groups(opened: Opened, rank: int) -> dict[str, Ranks]:
    """The replica group of this rank for each needed key that other ranks need, too."""
    by_key = {}
    for key, plan in _keys(opened):
        if key in opened.needed:
            ranks = opened.reader.peers(plan)
            first = ranks.index(rank) // LARGEST_GROUP * LARGEST_GROUP
            by_key[key] = ranks[first : first + LARGEST_GROUP]
    return {key: ranks for key, ranks in by_key.items() if len(ranks) > 1}


def _keys(opened: Opened) -> Iterator[tuple[str, ParameterPlan]]:
    """The keys of which this rank holds elements, with their plans.

    Other keys are left out: a rank may have matched keys of which it holds nothing, and its peers may not.
    """
    for item in opened.planned:
        for component in _held(item.plan):
            yield item.plan.model_key(component), item.plan
    for plan in opened.updated:
        for component in _held(plan):
            for slot in opened.slots.get(plan.state_name(component), {}):
                yield plan.slot_key(component, slot), plan


def _held(plan: ParameterPlan) -> Iterable[Component]:
    return dict.fromkeys(slice_.component for slice_ in plan.slices)


def readers(lengths: Sequence[int], count: int) -> list[int]:
    """The reader of each chunk: neighbouring chunks go to one rank, and each rank reads about as many bytes.

    Args:
        lengths: Bytes of each chunk, in the order of the files.
        count: The number of ranks.

    Returns:
        For each chunk, the place of its reader among the ranks.
    """
    total, before, places = sum(lengths), 0, []
    for length in lengths:
        places.append(min(count - 1, (2 * before + length) * count // (2 * total)) if total else 0)
        before += length
    return places


def blocks(opened: Opened, chunks: Iterable[StoredChunk], limit: int) -> Iterator[SharedBlock]:
    """The needed parts of chunks, in blocks of at most `limit` bytes; whole rows where they fit."""
    for chunk in chunks:
        dtype = dtype_from_name(opened.source.metadata.keys[chunk.key].dtype)
        for wanted in opened.needed[chunk.key]:
            common = chunk.box.intersect(wanted)
            for box in _cut(common, limit // dtype.itemsize) if common is not None else ():
                yield SharedBlock(chunk, box, dtype)


def _cut(box: Box, elements: int) -> Iterator[Box]:
    row = math.prod(box.size[1:])
    step = elements - elements % row if elements >= row else elements
    for start in range(0, box.volume, step):
        for part, _ in boxes_of(FlatRange(start, min(start + step, box.volume)), box.size):
            yield Box(tuple(a + b for a, b in zip(box.offset, part.offset, strict=True)), part.size)


def rounds(shares: Collection[Iterable[SharedBlock]], limit: int) -> list[list[list[SharedBlock]]]:
    """The blocks that each rank passes on in each round: by round, then by rank, at most `limit` bytes together."""
    batches = [list(_batches(share, limit)) for share in shares]
    return [
        [own[number] if number < len(own) else [] for own in batches]
        for number in range(max(map(len, batches), default=0))
    ]


def _batches(share: Iterable[SharedBlock], limit: int) -> Iterator[list[SharedBlock]]:
    batch: list[SharedBlock] = []
    used = 0
    for item in share:
        if batch and used + item.room > limit:
            yield batch
            batch, used = [], 0
        batch.append(item)
        used += item.room
    if batch:
        yield batch
