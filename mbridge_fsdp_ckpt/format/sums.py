# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Checksums of the parts of a large record: of some of its rows, a load reads and verifies little besides.

    record   | before | block 0 | block 1 | ... | last block | after | sums |
    sums     a digest of before and after, then one of each block of elements: 64 bits each, little-endian

The index has the digest of the sums.  A record whose elements are no more than a block has no sums, and in the index
its own digest.  Stock reads from `before` to `after`: what `torch.save` wrote.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Buffer, Callable

import numpy as np
import numpy.typing as npt

from mbridge_fsdp_ckpt.io.checksums import Hasher, as_text, digest
from mbridge_fsdp_ckpt.plan import records

_DIGEST = np.dtype("<u8")


def sums_bytes(size: int) -> int:
    """Bytes of the sums of a record with so many bytes of elements."""
    return 0 if size <= records.HASHED_BLOCK else _DIGEST.itemsize * (1 + -(-size // records.HASHED_BLOCK))


def sums_bytes_of(sizes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`sums_bytes` of many records at once."""
    block = np.uint64(records.HASHED_BLOCK)
    blocks = sizes // block + np.minimum(sizes % block, np.uint64(1))
    found: npt.NDArray[np.uint64] = np.where(sizes > block, (blocks + np.uint64(1)) * _DIGEST.itemsize, np.uint64(0))
    return found


def blocks_of(sums: Buffer, first: int, count: int) -> list[int]:
    """Digests of blocks, by a record's sums; fewer where it has fewer."""
    found: list[int] = np.frombuffer(sums, dtype=_DIGEST)[1 + first : 1 + first + count].tolist()
    return found


class BlockHasher:
    """Digests of blocks of bytes that come in pieces of any length."""

    def __init__(self) -> None:
        self._running, self._left, self._found = Hasher(), records.HASHED_BLOCK, list[int]()

    def update(self, data: Buffer) -> None:
        """Add bytes."""
        view = memoryview(data).cast("B")
        while view.nbytes:
            part, view = view[: self._left], view[self._left :]
            self._running.update(part)
            self._left -= part.nbytes
            if not self._left:
                self._found.append(self._running.number())
                self._running, self._left = Hasher(), records.HASHED_BLOCK

    def numbers(self) -> list[int]:
        """The digests so far, the last one perhaps of less than a block."""
        return [*self._found, self._running.number()] if self._left < records.HASHED_BLOCK else self._found


class RecordHasher:
    """The checksum of a record that has sums.

    Args:
        lead: Its bytes before the elements.
        size: Bytes of its elements.
        trail: Its bytes between elements and sums.
    """

    def __init__(self, lead: int, size: int, trail: int) -> None:
        self._around, self._blocks, self._stored = Hasher(), BlockHasher(), bytearray()
        self._parts: deque[tuple[int, Callable[[memoryview], None]]] = deque(
            [
                (lead, self._around.update),
                (size, self._blocks.update),
                (trail, self._around.update),
                (sys.maxsize, self._stored.extend),
            ]
        )

    def update(self, data: Buffer) -> None:
        """Add bytes of the record, its sums at last."""
        view = memoryview(data).cast("B")
        while view.nbytes:
            left, take = self._parts[0]
            part, view = view[:left], view[left:]
            take(part)
            self._parts[0] = left - part.nbytes, take
            if part.nbytes == left:
                self._parts.popleft()

    def sums(self) -> bytes:
        """Those of the bytes so far."""
        return np.array([self._around.number(), *self._blocks.numbers()], dtype=_DIGEST).tobytes()

    def number(self) -> int:
        """What the index has of the record, 64 bits; something else if its sums are not those of its bytes."""
        sums = self.sums()
        return digest(sums if self._stored == sums else sums + self._stored)

    def result(self) -> str:
        """The same, as the manifest has checksums."""
        return as_text(self.number())


def hasher_of(lead: int, size: int, length: int) -> Hasher | RecordHasher:
    """What a record is hashed by.

    Args:
        lead: Its bytes before the elements.
        size: Bytes of its elements.
        length: All of its bytes.
    """
    sums = sums_bytes(size)
    return RecordHasher(lead, size, length - lead - size - sums) if sums else Hasher()
