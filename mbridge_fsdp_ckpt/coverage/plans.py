# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other about their plans, bounded, and what rank 0 makes of it.

Each rank adds up fingerprints of its blocks in a fixed number of buckets, by key.  A block's fingerprint has three
parts; added up over all ranks, each is zero if

    replicas    every replica that somebody holds tiles the tensor by itself
    writers     the blocks that are written tile it, too
    presence    all n replicas are there, and one of them writes: each counts 1/n of a word, the writer less a whole one

Where every bucket is zero, each element of each tensor is written once, or by ranks that know nothing of each other
at all: the index then has a key's first element twice, which `merged` sees when all have written.  Otherwise the ranks
name their blocks in the bad buckets, and these are compared one by one: a tensor that only some ranks hold is in order
if its writer is one of them.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mbridge_fsdp_ckpt.coverage.rows import IN_ALL, OF_ONE_RANK, Place, Rows, rows_of, together
from mbridge_fsdp_ckpt.errors import PlanDisagreementError
from mbridge_fsdp_ckpt.live.local_shards import LocalShard
from mbridge_fsdp_ckpt.plan.boxes import Box, Shape, whole
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name
from mbridge_fsdp_ckpt.plan.keys import Kind
from mbridge_fsdp_ckpt.plan.layout import Axis
from mbridge_fsdp_ckpt.plan.tiling import PRIME, TilingFingerprint, tiling_defect

BUCKETS = 256
_KEYS_NAMED = 10


type BlockRow = tuple[str, str, Kind, list[int], list[int], list[int], int, int, bool, bool]
"""A `Block` as JSON-able data: its fields, a box as offset and size, a replica as its number and theirs."""


@dataclass(frozen=True, slots=True)
class Block:
    """What one rank plans for one block of a tensor.

    Args:
        key: The tensor's key.
        dtype: Its dtype.
        kind: See `KeyEntry`.
        shape: Its global shape.
        box: The block.
        replica: This rank's place among those that hold the very same block.
        is_copy: Whether it is a later pipeline stage's copy; `replica` counts such copies then.
        writes: Whether this rank writes it.
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
        """Whether the tensor is one number of a parameter."""
        return self.kind != "sharded"

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.box.volume * dtype_from_name(self.dtype).itemsize

    @property
    def is_origin(self) -> bool:
        """Whether it holds the tensor's first element; an empty block counts, since nothing else tells of it."""
        return not any(self.box.offset) or not self.box.volume

    def to_wire(self) -> BlockRow:
        """As JSON-able data."""
        tensor = self.key, self.dtype, self.kind, list(self.shape)
        place = list(self.box.offset), list(self.box.size), self.replica.index, self.replica.count
        return *tensor, *place, self.is_copy, self.writes

    @classmethod
    def from_wire(cls, row: BlockRow) -> Block:
        """What `to_wire` gave."""
        key, dtype, kind, shape, offset, size, index, count, is_copy, writes = row
        box = Box(tuple(offset), tuple(size))
        return cls(key, dtype, kind, tuple(shape), box, Axis(index, count), is_copy, writes)


def bucket_of(key: str) -> int:
    """The bucket a key falls into."""
    return zlib.crc32(key.encode()) % BUCKETS


def key_word(key: str) -> int:
    """A pseudo-random number for a key, modulo `PRIME`."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") % PRIME


def share_of_one(replica: Axis) -> int:
    """1/n, modulo `PRIME`, for one of n replicas: they add up to one."""
    return pow(replica.count, -1, PRIME)


def in_buckets(shares: Iterable[tuple[str, int]]) -> list[int]:
    """Shares added up by the buckets of their keys."""
    buckets = [0] * BUCKETS
    for key, share in shares:
        bucket = bucket_of(key)
        buckets[bucket] = (buckets[bucket] + share) % PRIME
    return buckets


def fingerprint(blocks: Iterable[Block]) -> list[int]:
    """One rank's buckets.

    Raises:
        PlanDisagreementError: The rank itself would write a tensor twice.
    """
    blocks = list(blocks)
    times = Counter(block.key for block in blocks if block.writes and block.is_origin)
    twice = sorted(key for key, count in times.items() if count > 1)
    if twice:
        raise PlanDisagreementError(
            expected="one parameter, buffer or slot for each key",
            found=f"several on one rank, of {len(twice)} keys",
            remedy="Do two modules have the same name on disk? Nothing was written.",
            key=twice[0],
        )
    return in_buckets((block.key, _share(block)) for block in blocks)


@lru_cache(maxsize=1 << 16)
def _share(block: Block) -> int:
    """One block's share; kept, so that the next save of the same blocks computes nothing."""
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


def added(fingerprints: Iterable[list[int]]) -> list[int]:
    """Fingerprints of several ranks, as one."""
    return [sum(column) % PRIME for column in zip(*fingerprints, strict=True)]


def remainders_of(fingerprint: list[int]) -> dict[int, int]:
    """Buckets that do not add up to zero, with their remainders."""
    return {bucket: total for bucket, total in enumerate(fingerprint) if total}


def add(fingerprints: Iterable[list[int]]) -> dict[int, int]:
    """Buckets of all ranks that do not add up to zero, with their remainders."""
    return remainders_of(added(fingerprints))


def blocks_in(rank: int, blocks: Iterable[Block], buckets: Iterable[int]) -> Rows[BlockRow]:
    """This rank's blocks in the given buckets, as data, up to a bound."""
    wanted = set(buckets)
    return rows_of(rank, [block.to_wire() for block in blocks if bucket_of(block.key) in wanted], _place)


def combine(messages: Sequence[Rows[BlockRow]]) -> Rows[BlockRow]:
    """What several ranks gave of `blocks_in`."""
    return together(messages, _place)


def _place(row: BlockRow) -> Place:
    """What only some ranks hold is mostly in order, and is replicated: named first, so that all of it is compared."""
    block = Block.from_wire(row)
    return block.replica.count == 1 and not block.is_copy, block.key


def decide(rows: Rows[BlockRow], remainders: Mapping[int, int]) -> None:
    """Decide the blocks that ranks named one by one.

    Args:
        rows: What `blocks_in` gave, combined.
        remainders: What `add` found.

    Raises:
        PlanDisagreementError: It names the keys and ranks that contradict each other.
    """
    by_key: dict[str, list[tuple[int, Block]]] = defaultdict(list)
    for rank, found in rows["by_rank"]:
        for block in map(Block.from_wire, found):
            by_key[block.key].append((rank, block))
    defects = [f"{key}: {text}" for key, held in sorted(by_key.items()) if (text := _defect(held))]
    named = in_buckets((block.key, _share(block)) for held in by_key.values() for _, block in held)
    if not defects and all(named[bucket] == remainder for bucket, remainder in remainders.items()):
        return
    shown = (
        "; ".join(defects[:_KEYS_NAMED])
        or f"contradictions beyond the blocks named, {OF_ONE_RANK} of a rank and {IN_ALL} in all"
    )
    more = f"; and {len(defects) - _KEYS_NAMED} more keys" if len(defects) > _KEYS_NAMED else ""
    raise PlanDisagreementError(
        expected="plans that write every element of every tensor once",
        found=shown + more,
        remedy="The ranks hold different models, or a parameter's metadata was changed on the ranks named. "
        "Nothing was written.",
    )


def _defect(held: list[tuple[int, Block]]) -> str:
    """What keeps one key's blocks from being written once each, in words; empty where nothing does."""
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
    return f"no rank writes it: rank {ranks} hold it, but not the one of {count} that is to"


def ranks_listed(ranks: Iterable[int]) -> str:
    """Ranks for an error, up to a bound."""
    found = sorted(set(ranks))
    return ", ".join(map(str, found[:8])) + (", ..." if len(found) > 8 else "")
