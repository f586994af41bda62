"""Chunk tables: each writing rank's own, so that no process holds the chunks of all ranks.

A table is JSON lines: a header, then one chunk a line, `CHUNK_FIELDS` in order.  Everything is checked here, before
any payload is opened: types, bounds, boxes inside their keys, bytes inside their files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

from mbridge_fsdp_ckpt.geometry import Box
from mbridge_fsdp_ckpt.storage.files import AnyPath, malformed, opened, parse_json
from mbridge_fsdp_ckpt.storage.manifest import validated
from mbridge_fsdp_ckpt.storage.schema import MAX_INT, KeyEntry, TableHeader
from mbridge_fsdp_ckpt.storage.values import dtype_from_name

CHUNK_FIELDS = ("key", "file", "offset", "length", "box_offset", "box_size", "checksum", "frame_offset", "frame_length")
_MAX_LINE_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Chunk:
    """One box of one key in a file.

    Args:
        key: The key.
        file: Index into the header's files.
        offset: First byte of the raw elements, row-major, little-endian.
        length: Bytes of raw elements.
        box: Which block of the key.
        checksum: Of the frame's bytes, the raw elements among them.
        frame: (offset, length) of the enclosing `torch.save` record, which stock DCP reads.
    """

    key: str
    file: int
    offset: int
    length: int
    box: Box
    checksum: str
    frame: tuple[int, int]

    def to_row(self) -> list[Any]:
        """A line of the table."""
        box = list(self.box.offset), list(self.box.size)
        return [self.key, self.file, self.offset, self.length, *box, self.checksum, *self.frame]


def table_bytes(header: TableHeader, chunks: list[Chunk]) -> bytes:
    """A table's content."""
    lines = [header.model_dump(mode="json"), *(chunk.to_row() for chunk in chunks)]
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()


def read_table_header(path: AnyPath) -> TableHeader:
    """Read the first line of a table that has been verified, or is being written."""
    with opened(path) as file:
        return _header(path, file)


def read_table(path: AnyPath, keys: Mapping[str, KeyEntry]) -> Iterator[Chunk]:
    """The chunks of a table, each checked against its key and its file.

    Raises:
        ManifestError: A chunk lies outside its file or its key, has another length than its box, or an unknown key.
    """
    with opened(path) as file:
        header = _header(path, file)
        count = 0
        while line := file.readline(_MAX_LINE_BYTES):
            chunk = _chunk(path, parse_json(path, line))
            _check_chunk(path, chunk, header, keys)
            count += 1
            yield chunk
    if count != header.chunks:
        raise malformed(path, f"{header.chunks} chunks", f"{count}")


def _header(path: AnyPath, file: IO[bytes]) -> TableHeader:
    return validated(TableHeader, parse_json(path, file.readline(_MAX_LINE_BYTES)), path)


def _chunk(path: AnyPath, row: Any) -> Chunk:
    try:
        key, file, offset, length, box_offset, box_size, digest, frame_offset, frame_length = row
        numbers = (file, offset, length, frame_offset, frame_length, *box_offset, *box_size)
        if not all(type(n) is int and 0 <= n <= MAX_INT for n in numbers):
            raise ValueError("numbers must be integers of 0 to 2**63 - 1")
        if not isinstance(key, str) or not isinstance(digest, str):
            raise TypeError("key and checksum must be strings")
        if not isinstance(box_offset, list) or not isinstance(box_size, list):
            raise TypeError("box offset and size must be lists")
        return Chunk(
            key, file, offset, length, Box(tuple(box_offset), tuple(box_size)), digest, (frame_offset, frame_length)
        )
    except (TypeError, ValueError) as error:
        raise malformed(path, f"a chunk: {', '.join(CHUNK_FIELDS)}", f"{error}; {str(row)[:200]}") from error


def _check_chunk(path: AnyPath, chunk: Chunk, header: TableHeader, keys: Mapping[str, KeyEntry]) -> None:
    entry = keys.get(chunk.key)
    if entry is None:
        raise malformed(path, "chunks of keys that the manifest lists", f"key {chunk.key!r}"[:300])
    if not chunk.box.inside(entry.shape):
        raise malformed(path, f"{chunk.key}: a box inside shape {entry.shape}", f"{chunk.box}"[:300])
    if chunk.length != chunk.box.volume * dtype_from_name(entry.dtype).itemsize:
        raise malformed(path, f"{chunk.key}: {chunk.box.volume} elements of {entry.dtype}", f"{chunk.length} bytes")
    if chunk.file >= len(header.files):
        raise malformed(path, f"one of {len(header.files)} files", f"file {chunk.file}")
    start, end = chunk.frame[0], sum(chunk.frame)
    if not (start <= chunk.offset and chunk.offset + chunk.length <= end <= header.files[chunk.file].size):
        raise malformed(path, f"{chunk.key}: bytes inside {header.files[chunk.file]}", f"{chunk}"[:500])
