# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Whether ranks that hold copies of one block hold the same values, of which only one rank's are written.

Each rank hashes the blocks that other ranks hold, too, and adds the hashes up in buckets, as for plans (`buckets`):

    a block that n ranks hold      its writer adds (n - 1) x its hash, each other rank subtracts its hash

A later pipeline stage's copy is not compared: the stage that writes does not know of it.
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
"""Buffers that tensor parallelism cuts without a mark: `_amax` and others of ModelOpt's `TensorQuantizer` (0.47)."""

_KEYS_NAMED = 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Copy:
    """A block that other ranks hold, too, and the hash of this rank's copy.

    Args:
        block: The block.
        digest: The 64-bit hash of the copy's bytes.
    """

    block: Block
    digest: int

    @property
    def key(self) -> str:
        """The tensor's key."""
        return self.block.key

    @property
    def share(self) -> int:
        """The number that this copy adds to its bucket: zero over all ranks if their copies are equal."""
        block = self.block
        times = block.replica.count - 1 if block.writes else -1
        return self.digest * times * _word(block.key, block.box) % PRIME

    @property
    def place(self) -> Place:
        """See `Block.place`."""
        return self.block.place

    def to_wire(self) -> tuple[BlockRow, int]:
        """The copy as JSON-able data."""
        return self.block.to_wire(), self.digest

    @classmethod
    def from_wire(cls, row: tuple[BlockRow, int]) -> Copy:
        """The copy that `to_wire` described."""
        block, digest = row
        return cls(Block.from_wire(block), digest)


@lru_cache(maxsize=1 << 16)
def _word(key: str, box: Box) -> int:
    return key_word(f"{key}|{box}")


def is_compared(block: Block, choice: str) -> bool:
    """Whether a block's values are compared with other ranks'.

    Args:
        block: The block.
        choice: `Settings.replicas`; "ignore" compares only buffers of quantizers, whose values would be lost.
    """
    is_copied = block.replica.count > 1 and not block.is_copy
    return is_copied and (choice != "ignore" or fnmatchcase(block.key, SHARDED_WITHOUT_A_WORD))


@dataclass(slots=True)
class DifferingCopies[V](RowRound[Copy, V]):
    """A meeting that is held only where sums of hashes are not zero: it names the copies that differ.

    A sum may also differ because only some ranks hold a tensor; the save is committed then.

    Args:
        choice: `Settings.replicas`: whether copies that differ are an error, or a warning.
    """

    choice: str
    phase, kind = "comparison of copies", Copy

    def check(self, held: list[tuple[int, Copy]], *, all_named: bool) -> None:
        """Name keys and ranks, in an error or in the log.

        Raises:
            UnsupportedStateError: A buffer of a quantizer differs: tensor parallelism has cut it.
            ReplicaMismatchError: Copies of another tensor differ, and `choice` is "error".
        """
        differing = _differing(held)
        cut = {key: ranks for key, ranks in differing.items() if fnmatchcase(key, SHARDED_WITHOUT_A_WORD)}
        if cut:
            raise UnsupportedStateError(
                expected="buffers of quantizers to be equal on all ranks that hold copies of them",
                found=_named(cut),
                remedy=remedy(
                    "Tensor parallelism cuts these buffers, and does not mark how: save at tensor-parallel size 1.",
                    "Or leave these buffers out, with {include}.",
                ),
                key=next(iter(cut)),
            )
        if not differing and all_named:
            return
        beyond = f"differences beyond the blocks that are compared, {OF_ONE_RANK} of a rank and {IN_ALL} in all"
        error = ReplicaMismatchError(
            expected="ranks that hold copies of a tensor to hold the same values",
            found=_named(differing) or beyond,
            remedy="One rank's copy is written. Find what changes the others: a missing reduction, a generator with "
            "another seed, a rank restored by hand.",
            key=next(iter(differing), None),
        )
        if self.choice == "error":
            raise error
        _log.warning("%s", error)


type _Differing = Mapping[str, tuple[set[int], set[int]]]
"""By key, the ranks whose copy is written, and the ranks whose copies differ from it."""


def _differing(copies: Iterable[tuple[int, Copy]]) -> _Differing:
    by_block: dict[tuple[str, Box], list[tuple[int, Copy]]] = defaultdict(list)
    for rank, copy in copies:
        by_block[copy.key, copy.block.box].append((rank, copy))
    differing: dict[str, tuple[set[int], set[int]]] = {}
    for (key, _), held in sorted(by_block.items(), key=lambda item: item[0][0]):
        writer, written = next(((rank, copy) for rank, copy in held if copy.block.writes), held[0])
        others = {rank for rank, copy in held if copy.digest != written.digest}
        if others:
            writers, ranks = differing.setdefault(key, (set(), set()))
            writers.add(writer)
            ranks |= others
    return differing


def _named(differing: _Differing) -> str:
    texts = [
        f"{key}: rank {ranks_listed(others)} differs from rank {ranks_listed(writers)}, which writes it"
        for key, (writers, others) in differing.items()
    ]
    return listed(texts, _KEYS_NAMED)
