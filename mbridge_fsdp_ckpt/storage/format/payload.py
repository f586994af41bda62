"""Writing a rank's tensors: `__<rank>_0.distcp`, one `torch.save` record a chunk.

The record is what stock DCP reads; the raw elements inside it, whose place the index has, are what this
package reads, without unpickling.  Each record and the whole file are hashed while they are written.  Nothing is
copied on the host: a device shard passes through one buffer of the chunk's size.
"""

from __future__ import annotations

from collections.abc import Buffer, Callable, Iterator
from contextlib import contextmanager
from typing import IO, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import serialization

from mbridge_fsdp_ckpt.errors import InternalError
from mbridge_fsdp_ckpt.plan.boxes import Box, Shape
from mbridge_fsdp_ckpt.storage.checksums import HASHED_AT_ONCE, Hasher
from mbridge_fsdp_ckpt.storage.entries import FileEntry
from mbridge_fsdp_ckpt.storage.format.rows import Chunk, Number
from mbridge_fsdp_ckpt.storage.ranges import ByteRange
from mbridge_fsdp_ckpt.storage.store import AnyPath, store_of


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
        self._hasher, self._record_hasher = Hasher(), Hasher()
        self._position = 0
        self._awaited, self._found = (0, 0), -1
        self._around = bytearray(), bytearray()
        self._frames: dict[tuple[torch.dtype, Shape], tuple[bytes, bytes]] = {}
        self._refused: OSError | None = None

    def append(self, data: bytes) -> None:
        """Append bytes that are no chunk."""
        self._append(memoryview(data))

    def write(self, data: Buffer) -> int:
        """Append what `torch.save` writes, which calls this, and buries an error of it under one of its own."""
        view = memoryview(data).cast("B")
        if view.nbytes and _place(view) == self._awaited:
            self._found = self._position
        else:
            self._around[self._found >= 0].extend(view)
        try:
            return self._append(view)
        except OSError as error:
            self._refused = error
            raise

    def _append(self, view: memoryview) -> int:
        for start in range(0, view.nbytes, HASHED_AT_ONCE):
            block = view[start : start + HASHED_AT_ONCE]
            self._file.write(block)
            self._hasher.update(block)
            self._record_hasher.update(block)
            self._position += block.nbytes
            self._progress()
        return view.nbytes

    def flush(self) -> None:
        """`torch.save` calls this; `close` flushes."""

    @property
    def position(self) -> int:
        """Bytes written so far."""
        return self._position

    def add(self, key: str, elements: torch.Tensor, box: Box) -> Chunk:
        """Append a chunk.

        What `torch.save` writes around the elements depends on their dtype and shape alone: it is asked once for each.

        Args:
            key: Its key.
            elements: The box's elements, row-major, one-dimensional, on any device.
            box: The block of the key that they are.
        """
        raw = host_bytes(elements)
        start, self._record_hasher = self._position, Hasher()
        form = elements.dtype, box.size
        if form in self._frames:
            before, after = self._frames[form]
            for part in (before, raw, after):
                self._append(memoryview(part))
            offset = start + len(before) if raw.nbytes else start
        else:
            offset = self._save(key, raw, elements.dtype, box)
            self._frames[form] = bytes(self._around[0]), bytes(self._around[1])
        record = ByteRange(start, self._position - start)
        return Chunk(key, box, record, offset - start, self._record_hasher.number())

    def _save(self, key: str, raw: npt.NDArray[np.uint8], dtype: torch.dtype, box: Box) -> int:
        """Append a record by `torch.save`; returns where its elements lie."""
        start, self._around = self._position, (bytearray(), bytearray())
        self._awaited, self._found = (_place(memoryview(raw)) if raw.nbytes else (0, 0)), -1
        flat = torch.from_numpy(raw).view(dtype) if raw.nbytes else torch.empty(0, dtype=dtype)
        record = flat.reshape(box.size)
        try:
            with without_crc32():
                torch.save(record, cast("IO[bytes]", self))
        except RuntimeError:
            if self._refused is not None:
                raise self._refused from None
            raise
        offset = self._found if raw.nbytes else start
        if offset < 0:
            raise InternalError(
                expected=f"torch.save to write the {raw.nbytes} bytes of {key} as they are, in one piece",
                found="no such write",
                remedy="Does this torch write another record? Report it with torch's version.",
            )
        return offset

    def close(self) -> FileEntry:
        """Flush to disk; returns the file's entry for the index."""
        self._file.finish()
        return FileEntry(name=self.path.name, size=self._position, checksum=self._hasher.result())

    def abort(self) -> None:
        """Close without a word."""
        self._file.close()


def number_of(key: str, elements: torch.Tensor, *, counts: bool = True) -> Number:
    """The row of one number, on any device: it has no record."""
    return Number(key, host_bytes(elements).tobytes(), counts)


def _place(view: memoryview) -> tuple[int, int]:
    """Where bytes lie in memory: address and length."""
    return np.frombuffer(view, dtype=np.uint8).ctypes.data, view.nbytes


def host_bytes(elements: torch.Tensor) -> npt.NDArray[np.uint8]:
    """A tensor's elements as bytes on the host; shares memory where it lies there already."""
    flat = elements.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


@contextmanager
def without_crc32() -> Iterator[None]:
    """The chunk's own checksum covers what zip's CRC-32 would, at a tenth of the time."""
    before = serialization.get_crc32_options()
    serialization.set_crc32_options(False)
    try:
        yield
    finally:
        serialization.set_crc32_options(before)
