# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Whether the plans of all ranks write every element of every tensor once: sums in buckets, then rows (`buckets`).

A block's share has three parts; added up over all ranks, each is zero if

    replicas    every replica that somebody holds tiles the tensor by itself
    writers     the blocks that are written tile it, too
    presence    all n replicas are there, and one of them writes: each replica adds w/n, the writer subtracts w

Where every bucket is zero, each element of each tensor is written once, or by ranks that know nothing of each other
at all: the index then has a key's first element twice, which `merged` sees when all have written.  Where blocks are
named one by one, a tensor that only some ranks hold is in order if its writer is one of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from mbridge_fsdp_ckpt.coverage import buckets
from mbridge_fsdp_ckpt.coverage.buckets import (
    IN_ALL,
    OF_ONE_RANK,
    Place,
    RowRound,
    key_word,
    listed,
    ranks_listed,
    share_of_one,
)
from mbridge_fsdp_ckpt.errors import PlanDisagreementError
from mbridge_fsdp_ckpt.live.local_shards import LocalShard
from mbridge_fsdp_ckpt.plan.boxes import Box, Shape, whole
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name
from mbridge_fsdp_ckpt.plan.keys import Kind
from mbridge_fsdp_ckpt.plan.layout import Axis
from mbridge_fsdp_ckpt.plan.tiling import PRIME, TilingFingerprint, tiling_defect

_KEYS_NAMED = 10


type BlockRow = tuple[str, str, Kind, list[int], list[int], list[int], int, int, bool, bool]
"""A `Block` as JSON-able data: its fields, a box as offset and size, a replica as its number and theirs."""


@dataclass(frozen=True, slots=True)
class Block:
    """What one rank plans for one block of a tensor.

    Args:
        key: The tensor's key.
        dtype: The tensor's dtype.
        kind: Whether the tensor is sharded like its parameter, or a scalar.
        shape: The tensor's global shape.
        box: The block.
        replica: This rank's place among the ranks that hold the same block.
        is_copy: Whether it is a later pipeline stage's copy; `replica` counts such copies then.
        writes: Whether this rank writes the block.
    """

    key: str
    dtype: str
    kind: Kind
    shape: Shape
    box: Box
    replica: Axis
    is_copy: bool
    writes: bool

    @classmethod
    def of(cls, shard: LocalShard) -> Block:
        """A local shard's block."""
        entry, slice_ = shard.entry, shard.slice_
        is_copy = shard.plan.layout.is_copy
        return cls(shard.key, entry.dtype, entry.kind, entry.shape, shard.box, slice_.replica, is_copy, slice_.writes)

    @property
    def is_scalar(self) -> bool:
        """Whether the tensor is a single number."""
        return self.kind != "sharded"

    @property
    def nbytes(self) -> int:
        """Bytes of the block's elements."""
        return self.box.volume * dtype_from_name(self.dtype).itemsize

    @property
    def is_origin(self) -> bool:
        """Whether the block holds the tensor's first element; True for an empty block, which must be counted, too."""
        return not any(self.box.offset) or not self.box.volume

    @property
    def share(self) -> int:
        """The number that the block adds to its bucket; over all ranks a tensor's shares add up to zero."""
        return _share(self)

    @property
    def place(self) -> Place:
        """The order in which blocks are named in a dispute: replicated blocks and copies first, then by key.

        A tensor that only some ranks hold is mostly in order, and is replicated.  It comes first, so that all of its
        blocks are compared.
        """
        return self.replica.count == 1 and not self.is_copy, self.key

    def to_wire(self) -> BlockRow:
        """The block as JSON-able data."""
        tensor = self.key, self.dtype, self.kind, list(self.shape)
        place = list(self.box.offset), list(self.box.size), self.replica.index, self.replica.count
        return *tensor, *place, self.is_copy, self.writes

    @classmethod
    def from_wire(cls, row: BlockRow) -> Block:
        """The block that `to_wire` described."""
        key, dtype, kind, shape, offset, size, index, count, is_copy, writes = row
        box = Box(tuple(offset), tuple(size))
        return cls(key, dtype, kind, tuple(shape), box, Axis(index, count), is_copy, writes)


def fingerprint(blocks: Iterable[Block]) -> list[int]:
    """The sums of one rank's blocks, by bucket.

    Raises:
        PlanDisagreementError: The rank itself would write a tensor twice.
    """
    blocks = list(blocks)
    times = Counter(block.key for block in blocks if block.writes and block.is_origin)
    twice = sorted(key for key, count in times.items() if count > 1)
    if twice:
        raise PlanDisagreementError(
            expected="one parameter, buffer or slot for each key",
            found=f"{len(twice)} keys that several tensors on one rank have",
            remedy="Check whether two modules have the same name on disk. Nothing was written.",
            key=twice[0],
        )
    return buckets.fingerprint(blocks)


@lru_cache(maxsize=1 << 16)
def _share(block: Block) -> int:
    """The share of one block; cached, so that the next save of the same blocks computes nothing."""
    identity = f"{block.key}|{block.dtype}|{block.kind}"
    place = f"{block.replica.index} of {block.replica.count}" + (" copy" if block.is_copy else "")
    share = _part_of_tiling(f"{identity}|{place}", block)
    if block.writes:
        share += _part_of_tiling(f"{identity}|written", block)
    if block.is_origin:
        word = key_word(f"{identity}|{block.shape}|present")
        share += word * (share_of_one(block.replica) - block.writes)
    return share % PRIME


def _part_of_tiling(identity: str, block: Block) -> int:
    tiling = TilingFingerprint.of(identity, block.shape)
    part = tiling.of_box(block.box)
    return part - tiling.of_whole() if block.is_origin else part


class DisputedPlans[V](RowRound[Block, V]):
    """A meeting that is held only where sums of plans are not zero: it names the blocks that contradict each other.

    Without a contradiction the save continues: a sum may also differ because only some ranks hold a tensor.
    """

    __slots__ = ()
    phase, kind = "disagreement on the plan", Block

    def check(self, held: list[tuple[int, Block]], *, all_named: bool) -> None:
        """Name the keys and ranks that contradict each other.

        Raises:
            PlanDisagreementError: Blocks contradict each other, or there are too many of them to name them all.
        """
        by_key: dict[str, list[tuple[int, Block]]] = defaultdict(list)
        for rank, block in held:
            by_key[block.key].append((rank, block))
        defects = [f"{key}: {text}" for key, of_key in sorted(by_key.items()) if (text := _defect(of_key))]
        if defects or not all_named:
            beyond = f"contradictions beyond the blocks that are compared, {OF_ONE_RANK} of a rank and {IN_ALL} in all"
            raise PlanDisagreementError(
                expected="plans that write every element of every tensor once",
                found=listed(defects, _KEYS_NAMED) or beyond,
                remedy="The ranks hold different models, or parameter metadata was changed on the ranks named. "
                "Nothing was written.",
            )


def _defect(held: list[tuple[int, Block]]) -> str:
    """A text that says why the blocks of one key would not be written once each; empty where they would."""
    for says in (_description, _copies):
        ranks_by_text: dict[str, list[int]] = defaultdict(list)
        for rank, block in held:
            if text := says(block):
                ranks_by_text[text].append(rank)
        if len(ranks_by_text) > 1:
            return ", ".join(f"rank {ranks_listed(ranks)} says {text}" for text, ranks in ranks_by_text.items())
    by_replica: dict[int, list[tuple[int, Box]]] = defaultdict(list)
    for rank, block in held:
        if not block.is_copy:  # several stages may have one
            by_replica[block.replica.index].append((rank, block.box))
    shape, written = held[0][1].shape, [(rank, block.box) for rank, block in held if block.writes]
    defects = (_tiling_defect(boxes, shape) for boxes in (*by_replica.values(), *([written] if written else [])))
    return next(filter(None, defects), "") or ("" if written else _nobody_writes(held))


def _description(block: Block) -> str:
    return f"{block.dtype} {list(block.shape)}" + ("" if block.kind == "sharded" else f" {block.kind}")


def _copies(block: Block) -> str:
    return "" if block.is_copy else f"{block.replica.count} ranks hold each block"


def _tiling_defect(held: list[tuple[int, Box]], shape: Shape) -> str:
    defect = tiling_defect(whole(shape), (box for _, box in held))
    if not defect:
        return ""
    for i, (rank, box) in enumerate(held):
        for other, second in held[i + 1 :]:
            if box.intersect(second):
                return f"ranks {min(rank, other)} and {max(rank, other)} hold the same rows"
    total = whole(shape).volume
    missing = total - sum(box.volume for _, box in held)
    holders = ranks_listed(rank for rank, _ in held)
    return f"no rank holds {missing} of {total} elements (rank {holders} hold the rest)"


def _nobody_writes(held: list[tuple[int, Block]]) -> str:
    ranks, count = ranks_listed([rank for rank, _ in held]), held[0][1].replica.count
    return f"no rank writes it: rank {ranks} hold it, but not the one of the {count} replicas that has to write it"
