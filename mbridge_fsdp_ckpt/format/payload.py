# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Writing a rank's tensors: `__<rank>_0.distcp`, one `torch.save` record a chunk.

The record is what stock DCP reads; the raw elements inside it, whose place the index has, are what this
package reads, without unpickling.  Each record and the whole file are hashed while they are written; after a large
record come the checksums of its parts (`sums`).  Of a device shard no more than a piece lies on the host at a time;
what lies there already is copied into the file's blocks alone.
"""

from __future__ import annotations

import math
from collections.abc import Buffer, Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import IO, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import serialization

from mbridge_fsdp_ckpt.errors import InternalError
from mbridge_fsdp_ckpt.format.rows import Chunk, Scalar
from mbridge_fsdp_ckpt.format.sums import RecordHasher, hasher_of, sums_bytes
from mbridge_fsdp_ckpt.io.checksums import HASHED_AT_ONCE, Hasher, Hashes
from mbridge_fsdp_ckpt.io.entries import FileEntry
from mbridge_fsdp_ckpt.io.host_bytes import host_bytes, host_pieces
from mbridge_fsdp_ckpt.io.ranges import ByteRange
from mbridge_fsdp_ckpt.io.store import AnyPath, store_of
from mbridge_fsdp_ckpt.plan.boxes import Box, Shape
from mbridge_fsdp_ckpt.plan.records import records_of

_SMALL = 1 << 14  # bytes that take longer to hash and to hand on, one by one, than to copy once more
_TOGETHER = 1 << 18  # bytes of small records, or a record more, that are handed on together


class PayloadWriter:
    """Appends chunks to one file.

    Args:
        path: A file that does not exist yet.
        progress: Called after every block: a chunk may take minutes.

    Raises:
        OSError: The storage refused.
    """

    def __init__(self, path: AnyPath, progress: Callable[[], None] = lambda: None) -> None:
        self.path, self._progress = path, progress
        self._file = store_of(path).create()
        self._hasher = Hasher()
        self._record_hasher: Hasher | RecordHasher = Hasher()
        self._position = 0
        self._small, self._hashed = bytearray(), 0

    def append(self, data: bytes) -> None:
        """Append bytes that are no chunk."""
        self._record_hasher = Hasher()
        self._append(data)
        self._append_small()

    def _append(self, data: Buffer) -> None:
        """Append a part of a record; small ones are hashed and handed on together."""
        view = memoryview(data).cast("B")
        if view.nbytes < _SMALL:
            self._small += view
            return
        self._append_small()
        self._append_at_once(view, self._hasher, self._record_hasher)

    def _append_small(self) -> None:
        """Hand on what is small; of the record that goes on, it is hashed by then."""
        self._hash_small()
        data, self._small, self._hashed = self._small, bytearray(), 0
        self._append_at_once(memoryview(data), self._hasher)

    def _hash_small(self) -> None:
        """Have hashed what the record has of what is small: this is all that it has, nearly always."""
        with memoryview(self._small)[self._hashed :] as rest:
            self._record_hasher.update(rest)
        self._hashed = len(self._small)

    def _append_at_once(self, view: memoryview, *hashers: Hashes) -> None:
        for start in range(0, view.nbytes, HASHED_AT_ONCE):
            block = view[start : start + HASHED_AT_ONCE]
            self._file.write(block)
            for hasher in hashers:
                hasher.update(block)
            self._position += block.nbytes
            self._progress()

    @property
    def position(self) -> int:
        """Bytes appended so far."""
        return self._position + len(self._small)

    def add(self, key: str, elements: torch.Tensor, box: Box) -> Chunk:
        """Append a chunk of a tensor's elements, row-major, one-dimensional, on any device; see `add_pieces`."""
        return self.add_pieces(key, elements.dtype, host_pieces(elements), box)

    def add_block(self, key: str, dtype: torch.dtype, pieces: Iterable[Buffer], box: Box) -> list[Chunk]:
        """Append a block as the chunks of its records: see `plan.records`, and `add_pieces`.

        Raises:
            InternalError, OSError: See `add_pieces`.
        """
        *firsts, last = records_of(box, dtype.itemsize)
        if not firsts:
            return [self.add_pieces(key, dtype, pieces, last)]
        stream = _Stream(pieces)
        chunks = [self.add_pieces(key, dtype, stream.take(one.volume * dtype.itemsize), one) for one in firsts]
        return [*chunks, self.add_pieces(key, dtype, stream.rest(), last)]

    def add_pieces(self, key: str, dtype: torch.dtype, pieces: Iterable[Buffer], box: Box) -> Chunk:
        """Append a chunk.

        What `torch.save` writes around the elements depends on their dtype and shape alone: it is asked once for each,
        in a training.

        Args:
            key: The key of the tensor.
            dtype: The dtype of the elements.
            pieces: The bytes of the box's elements, row-major, one piece after the other.
            box: The block of the key that they are.

        Raises:
            InternalError: This torch writes another record, or the pieces are not as long as the box.
            OSError: The storage refused.
        """
        before, after = _frame(dtype, box.size)
        start, expected, length = self.position, box.volume * dtype.itemsize, record_length(dtype, box.size)
        self._record_hasher = hasher_of(len(before), expected, length)
        self._append(before)
        first = self.position
        for piece in pieces:
            self._append(piece)
        found = self.position - first
        if found != expected:
            raise InternalError(
                expected=f"{expected} bytes of elements",
                found=str(found),
                remedy="Report it.",
                key=key,
            )
        self._append(after)
        self._hash_small()
        if isinstance(self._record_hasher, RecordHasher):
            self._append(self._record_hasher.sums())
            self._hash_small()
        if len(self._small) >= _TOGETHER:
            self._append_small()
        lead, record = len(before) if box.volume else 0, ByteRange(start, length)
        return Chunk(key, box, record, lead, expected, self._record_hasher.number())

    def close(self) -> FileEntry:
        """Flush to disk; returns the file's entry for the index."""
        self._append_small()
        self._file.finish()
        return FileEntry(name=self.path.name, size=self._position, checksum=self._hasher.result())

    def abort(self) -> None:
        """Close the file without flushing it, whether it is complete or not."""
        self._file.close()


class _Stream:
    """Pieces of bytes, cut anew where records end."""

    def __init__(self, pieces: Iterable[Buffer]) -> None:
        self._views = filter(None, (memoryview(piece).cast("B") for piece in pieces))  # none is empty
        self._begun = memoryview(b"")

    def take(self, length: int) -> Iterator[memoryview]:
        """The next bytes, as many as there are of this number."""
        while length and (view := self._begun or next(self._views, memoryview(b""))):
            part, self._begun = view[:length], view[length:]
            length -= part.nbytes
            yield part

    def rest(self) -> Iterator[memoryview]:
        """All that is left."""
        yield self._begun
        yield from self._views


def record_length(dtype: torch.dtype, shape: Shape) -> int:
    """Bytes of a chunk's record, with the checksums of its parts."""
    elements = math.prod(shape) * dtype.itemsize
    return sum(map(len, _frame(dtype, shape))) + elements + sums_bytes(elements)


@lru_cache(maxsize=1 << 12)
def _frame(dtype: torch.dtype, shape: Shape) -> tuple[bytes, bytes]:
    """The bytes that `torch.save` writes before and after the elements of a tensor."""
    raw = np.empty(Box((0,) * len(shape), shape).volume * dtype.itemsize, dtype=np.uint8)  # nobody reads or writes it
    flat = torch.from_numpy(raw).view(dtype) if raw.nbytes else torch.empty(0, dtype=dtype)
    around = _Around(raw)
    with without_crc32():
        torch.save(flat.reshape(shape), cast("IO[bytes]", around))
    if raw.nbytes and not around.found:
        raise InternalError(
            expected=f"torch.save to write the {raw.nbytes} bytes of a tensor as they are, in one piece",
            found="no such write",
            remedy="Does this torch write another record? Report it with torch's version.",
        )
    return bytes(around.parts[0]), bytes(around.parts[1])


class _Around:
    """A file that keeps what is written to it, but for some elements.

    Args:
        elements: These; nothing looks at them.
    """

    def __init__(self, elements: npt.NDArray[np.uint8]) -> None:
        self._awaited, self.found = _place(memoryview(elements)), False
        self.parts = bytearray(), bytearray()

    def write(self, data: Buffer) -> int:
        """See `IO`."""
        view = memoryview(data).cast("B")
        if view.nbytes and _place(view) == self._awaited:
            self.found = True
        else:
            self.parts[self.found].extend(view)
        return view.nbytes

    def flush(self) -> None:
        """See `IO`."""


def number_of(key: str, elements: torch.Tensor) -> Scalar:
    """The row of one number, on any device: it has no record."""
    return Scalar(key, host_bytes(elements).tobytes(), counts=True)


def _place(view: memoryview) -> tuple[int, int]:
    """Where bytes lie in memory: address and length."""
    return np.frombuffer(view, dtype=np.uint8).ctypes.data, view.nbytes


@contextmanager
def without_crc32() -> Iterator[None]:
    """The chunk's own checksum covers what zip's CRC-32 would, at a tenth of the time."""
    before = serialization.get_crc32_options()
    serialization.set_crc32_options(False)
    try:
        yield
    finally:
        serialization.set_crc32_options(before)
