"""Writing a rank's tensors: `__<rank>_0.distcp`, one `torch.save` record a chunk.

The record is what stock DCP reads; the raw elements inside it, whose place the chunk table has, are what this
package reads, without unpickling.  Each chunk is hashed while it is written.  Nothing is copied on the host: a
device shard passes through one buffer of the chunk's size.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Buffer, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch.serialization import get_crc32_options, set_crc32_options

from mbridge_fsdp_ckpt.errors import InternalError
from mbridge_fsdp_ckpt.geometry import Box
from mbridge_fsdp_ckpt.storage.checksums import Hasher, checksum
from mbridge_fsdp_ckpt.storage.manifest import Chunk, FileEntry


class PayloadWriter:
    """Appends chunks to one file.

    Args:
        path: A file that does not exist yet.
        file_index: Its index in the table's files.

    Raises:
        OSError: The file system refused.
    """

    def __init__(self, path: Path, file_index: int = 0) -> None:
        self.path, self._file_index = path, file_index
        self._file: IO[bytes] = path.open("x+b")
        self._hasher = Hasher()
        self._position = 0

    def write(self, data: Buffer) -> int:
        """Append bytes; `torch.save` calls this."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._hasher.update(view)
        self._position += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """`torch.save` calls this; `close` flushes."""

    @property
    def position(self) -> int:
        """Bytes written so far."""
        return self._position

    def add(self, key: str, elements: torch.Tensor, box: Box) -> Chunk:
        """Append a chunk.

        Args:
            key: Its key.
            elements: The box's elements, row-major, one-dimensional, on any device.
            box: The block of the key that they are.
        """
        raw = host_bytes(elements)
        start = self._position
        record = torch.from_numpy(raw).view(elements.dtype).reshape(box.size)
        with _without_crc32():
            torch.save(record, cast("IO[bytes]", self))
        frame = start, self._position - start
        offset = start + self._raw_offset(frame, raw.nbytes)
        return Chunk(key, self._file_index, offset, raw.nbytes, box, checksum(raw), frame)

    def close(self) -> FileEntry:
        """Flush to disk; returns the file's entry for the table."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileEntry(name=self.path.name, size=self._position, checksum=self._hasher.result())

    def abort(self) -> None:
        """Close without a word."""
        self._file.close()

    def _raw_offset(self, frame: tuple[int, int], length: int) -> int:
        """Where the elements lie in the record: an uncompressed zip entry named .../data/0."""
        self._file.flush()
        with zipfile.ZipFile(cast("IO[bytes]", _Window(self._file, *frame))) as record:
            entry = next(info for info in record.infolist() if info.filename.endswith("/data/0"))
        if entry.file_size != length or entry.compress_type != zipfile.ZIP_STORED:
            raise InternalError(
                expected=f"{length} uncompressed bytes in the torch.save record",
                found=f"{entry}",
                remedy="Does this torch write another record? Report it with torch's version.",
            )
        self._file.seek(frame[0] + entry.header_offset + 26)
        name, extra = (int.from_bytes(self._file.read(2), "little") for _ in range(2))
        self._file.seek(0, os.SEEK_END)
        return entry.header_offset + 30 + name + extra


class _Window:
    """A part of a file that looks like a whole one, for `zipfile`."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length
        self._at = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        left = self._length - self._at
        self._file.seek(self._start + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data


def host_bytes(elements: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A tensor's elements as bytes on the host; shares memory where it lies there already."""
    flat = elements.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


@contextmanager
def _without_crc32() -> Iterator[None]:
    """The chunk's own checksum covers what zip's CRC-32 would, at a tenth of the time."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
