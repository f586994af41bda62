# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Whether ranks that hold copies of one block hold the same values, which only one of them writes.

Each rank hashes the blocks that others hold, too, and adds the hashes up in buckets, as plans are added up (`buckets`):

    a block that n ranks hold      its writer adds (n - 1) x its hash, each other rank takes its hash off

A later pipeline stage's copy is compared with nothing: the stage that writes does not know of it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from mbridge_fsdp_ckpt.coverage.buckets import IN_ALL, OF_ONE_RANK, Place, RowRound, key_word, listed, ranks_listed
from mbridge_fsdp_ckpt.coverage.plans import Block, BlockRow
from mbridge_fsdp_ckpt.errors import ReplicaMismatchError, UnsupportedStateError
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.tiling import PRIME
from mbridge_fsdp_ckpt.remedies import remedy

SHARDED_WITHOUT_A_WORD = "*_quantizer._*"
"""Buffers that tensor parallelism cuts unmarked: those of ModelOpt's `TensorQuantizer` (0.47), `_amax` above all."""

_KEYS_NAMED = 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Copy:
    """A block that others hold, too, with what this rank holds of it.

    Args:
        block: The block.
        digest: Hash of its bytes, 64 bits.
    """

    block: Block
    digest: int

    @property
    def key(self) -> str:
        """The tensor's key."""
        return self.block.key

    @property
    def share(self) -> int:
        """See above."""
        block = self.block
        times = block.replica.count - 1 if block.writes else -1
        return self.digest * times * _word(block.key, block.box) % PRIME

    @property
    def place(self) -> Place:
        """That of the block."""
        return self.block.place

    def to_wire(self) -> tuple[BlockRow, int]:
        """As JSON-able data."""
        return self.block.to_wire(), self.digest

    @classmethod
    def from_wire(cls, row: tuple[BlockRow, int]) -> Copy:
        """What `to_wire` gave."""
        block, digest = row
        return cls(Block.from_wire(block), digest)


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


@dataclass(slots=True)
class DifferingCopies[V](RowRound[Copy, V]):
    """Only where hashes of copies do not add up: name the copies; some ranks may not hold a tensor, that is all.

    Args:
        choice: `Settings.replicas`: whether values that differ are an error, or a warning.
    """

    choice: str
    phase, kind = "comparison of copies", Copy

    def check(self, held: list[tuple[int, Copy]], *, all_named: bool) -> None:
        """Name keys and ranks, in an error or in the log.

        Raises:
            UnsupportedStateError: A tensor that differs is cut by tensor parallelism.
            ReplicaMismatchError: Another does.
        """
        differing = _differing(held)
        cut = {key: ranks for key, ranks in differing.items() if fnmatchcase(key, SHARDED_WITHOUT_A_WORD)}
        if cut:
            raise UnsupportedStateError(
                expected="buffers of quantizers to be alike on all ranks of a replica",
                found=_named(cut),
                remedy=remedy(
                    "Tensor parallelism cuts them, and nothing says where: save at tensor-parallel size 1.",
                    "Or without them, with {include}.",
                ),
                key=next(iter(cut)),
            )
        if not differing and all_named:
            return
        beyond = f"others beyond those named, {OF_ONE_RANK} of a rank and {IN_ALL} in all"
        error = ReplicaMismatchError(
            expected="ranks that hold copies of a tensor to hold the same values",
            found=_named(differing) or beyond,
            remedy="One rank's copy is written. Look for what changes the others: a missing reduction, a generator "
            "seeded otherwise, a rank restored by hand.",
            key=next(iter(differing), None),
        )
        if self.choice == "error":
            raise error
        _log.warning("%s", error)


type _Differing = Mapping[str, tuple[set[int], set[int]]]
"""By key, the ranks whose copy is written, and those that hold other values."""


def _differing(copies: Iterable[tuple[int, Copy]]) -> _Differing:
    by_block: dict[tuple[str, Box], list[tuple[int, Copy]]] = defaultdict(list)
    for rank, copy in copies:
        by_block[copy.key, copy.block.box].append((rank, copy))
    found: dict[str, tuple[set[int], set[int]]] = {}
    for (key, _), held in sorted(by_block.items(), key=lambda item: item[0][0]):
        writer, written = next(((rank, copy) for rank, copy in held if copy.block.writes), held[0])
        others = {rank for rank, copy in held if copy.digest != written.digest}
        if others:
            writers, ranks = found.setdefault(key, (set(), set()))
            writers.add(writer)
            ranks |= others
    return found


def _named(differing: _Differing) -> str:
    texts = [
        f"{key}: rank {ranks_listed(others)} unlike rank {ranks_listed(writers)}, which writes"
        for key, (writers, others) in differing.items()
    ]
    return listed(texts, _KEYS_NAMED)
