# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Whether ranks that hold copies of one block hold the same values, which only one of them writes.

Each rank hashes the blocks that others hold, too, and adds the hashes up in buckets, as plans are added up:

    a block that n ranks hold      its writer adds (n - 1) x its hash, each other rank takes its hash off

Where all are alike, nothing remains.  Otherwise the ranks name their hashes in the buckets that don't add up.  A later
pipeline stage's copy is compared with nothing: the stage that writes does not know of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from mbridge_fsdp_ckpt.coverage.plans import Block, bucket_of, in_buckets, key_word, ranks_listed
from mbridge_fsdp_ckpt.coverage.rows import IN_ALL, OF_ONE_RANK, Place, Rows, rows_of, together
from mbridge_fsdp_ckpt.errors import CheckpointError, ReplicaMismatchError, UnsupportedStateError
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.layout import Axis
from mbridge_fsdp_ckpt.plan.tiling import PRIME
from mbridge_fsdp_ckpt.remedies import remedy

SHARDED_WITHOUT_A_WORD = "*_quantizer._*"
"""Buffers that tensor parallelism cuts unmarked: those of ModelOpt's `TensorQuantizer` (0.47), `_amax` above all."""

_KEYS_NAMED = 20


type CopyRow = tuple[str, list[int], list[int], int, int, bool, int]
"""A `Copy` as JSON-able data: key, offset, size, replica and their number, whether it writes, hash."""


@dataclass(frozen=True, slots=True)
class Copy:
    """What one rank holds of a block that others hold, too.

    Args:
        key: The tensor's key.
        box: The block.
        replica: This rank's place among those that hold it.
        writes: Whether this rank writes it.
        digest: Hash of its bytes, 64 bits.
    """

    key: str
    box: Box
    replica: Axis
    writes: bool
    digest: int

    @property
    def share(self) -> int:
        """What it adds to its bucket, modulo `PRIME`."""
        times = self.replica.count - 1 if self.writes else -1
        return self.digest * times * _word(self.key, self.box) % PRIME

    def to_wire(self) -> CopyRow:
        """As JSON-able data."""
        box, replica = self.box, self.replica
        return self.key, list(box.offset), list(box.size), replica.index, replica.count, self.writes, self.digest

    @classmethod
    def from_wire(cls, row: CopyRow) -> Copy:
        """What `to_wire` gave."""
        key, offset, size, index, count, writes, found = row
        return cls(key, Box(tuple(offset), tuple(size)), Axis(index, count), writes, found)


@lru_cache(maxsize=1 << 16)
def _word(key: str, box: Box) -> int:
    return key_word(f"{key}|{box}")


def is_compared(block: Block, choice: str) -> bool:
    """Whether a block's values are compared with other ranks'.

    Args:
        block: The block.
        choice: `Settings.replicas`; "ignore" compares only what is lost if it differs.
    """
    is_copied = block.replica.count > 1 and not block.is_copy
    return is_copied and (choice != "ignore" or fnmatchcase(block.key, SHARDED_WITHOUT_A_WORD))


def copy_of(block: Block, found: int) -> Copy:
    """A block with the hash of its elements."""
    return Copy(block.key, block.box, block.replica, block.writes, found)


def fingerprint(copies: Iterable[Copy]) -> list[int]:
    """One rank's buckets."""
    return in_buckets((copy.key, copy.share) for copy in copies)


def copies_in(rank: int, copies: Iterable[Copy], buckets: Iterable[int]) -> Rows[CopyRow]:
    """This rank's copies in the given buckets, as data, up to a bound."""
    wanted = set(buckets)
    return rows_of(rank, [copy.to_wire() for copy in copies if bucket_of(copy.key) in wanted], _place)


def combine(messages: Sequence[Rows[CopyRow]]) -> Rows[CopyRow]:
    """What several ranks gave of `copies_in`."""
    return together(messages, _place)


def _place(row: CopyRow) -> Place:
    return False, row[0]


def mismatch(rows: Rows[CopyRow], remainders: Mapping[int, int]) -> CheckpointError | None:
    """What the copies that ranks named say: an error that names keys and ranks, or None where all are alike.

    Args:
        rows: What `copies_in` gave, combined.
        remainders: What `plans.add` found of the fingerprints.

    Returns:
        `UnsupportedStateError` where a tensor that differs is cut by tensor parallelism, else `ReplicaMismatchError`.
    """
    copies = [(rank, Copy.from_wire(row)) for rank, found in rows["by_rank"] for row in found]
    differing = _differing(copies)
    cut = [key for key in differing if fnmatchcase(key, SHARDED_WITHOUT_A_WORD)]
    if cut:
        return UnsupportedStateError(
            expected="buffers of quantizers to be alike on all ranks of a replica",
            found=_named({key: differing[key] for key in cut}),
            remedy=remedy(
                "Tensor parallelism cuts them, and nothing says where: save at tensor-parallel size 1.",
                "Or without them, with {include}.",
            ),
            key=cut[0],
        )
    named = in_buckets((copy.key, copy.share) for _, copy in copies)
    beyond = [bucket for bucket, remainder in remainders.items() if named[bucket] != remainder]
    if not differing and not beyond:
        return None  # some ranks do not hold a tensor, that is all
    return ReplicaMismatchError(
        expected="ranks that hold copies of a tensor to hold the same values",
        found=_named(differing) or f"others beyond those named, {OF_ONE_RANK} of a rank and {IN_ALL} in all",
        remedy="One rank's copy is written. Look for what changes the others: a missing reduction, a generator seeded "
        "otherwise, a rank restored by hand.",
        key=next(iter(differing), None),
    )


def _differing(copies: Iterable[tuple[int, Copy]]) -> dict[str, tuple[set[int], set[int]]]:
    """By key, the ranks whose copy is written, and those that hold other values."""
    by_block: dict[tuple[str, Box], list[tuple[int, Copy]]] = defaultdict(list)
    for rank, copy in copies:
        by_block[copy.key, copy.box].append((rank, copy))
    found: dict[str, tuple[set[int], set[int]]] = {}
    for (key, _), held in sorted(by_block.items(), key=lambda item: item[0][0]):
        writer, written = next(((rank, copy) for rank, copy in held if copy.writes), held[0])
        others = {rank for rank, copy in held if copy.digest != written.digest}
        if others:
            writers, ranks = found.setdefault(key, (set(), set()))
            writers.add(writer)
            ranks |= others
    return found


def _named(differing: Mapping[str, tuple[set[int], set[int]]]) -> str:
    texts = [
        f"{key}: rank {ranks_listed(others)} unlike rank {ranks_listed(writers)}, which writes"
        for key, (writers, others) in differing.items()
    ]
    more = f"; and {len(texts) - _KEYS_NAMED} more keys" if len(texts) > _KEYS_NAMED else ""
    return "; ".join(texts[:_KEYS_NAMED]) + more
