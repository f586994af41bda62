"""Chunk tables: each writing rank's own, so that no process holds the chunks of all ranks.

A table is JSON lines: a header, then one row a line: a chunk, or a number that stands in the table itself
(`schema.ROW`).  Everything is checked here, before any payload is opened: types, bounds, boxes inside their keys,
bytes inside their files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO

from pydantic import ValidationError

from mbridge_fsdp_ckpt.errors import ManifestError
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.storage.files import malformed, opened, parse_json
from mbridge_fsdp_ckpt.storage.format.manifest import validated
from mbridge_fsdp_ckpt.storage.format.schema import ROW, TableHeader
from mbridge_fsdp_ckpt.storage.ranges import ByteRange
from mbridge_fsdp_ckpt.storage.store import AnyPath

_MAX_LINE_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Chunk:
    """One box of one key in a file.

    Args:
        key: The key.
        file: Index into the header's files.
        elements: Where in the file the raw elements are, row-major, little-endian.
        box: Which block of the key.
        checksum: Of the record's bytes, the raw elements among them.
        record: What `torch.save` wrote, the raw elements in it; stock DCP reads that.
    """

    key: str
    file: int
    elements: ByteRange
    box: Box
    checksum: str
    record: ByteRange

    def to_row(self) -> list[object]:
        """A line of the table."""
        box = list(self.box.offset), list(self.box.size)
        return [self.key, self.file, *self.elements, *box, self.checksum, *self.record]


@dataclass(frozen=True, slots=True)
class Scalar:
    """One number of a parameter: its bytes stand in the table, a record of its own would be a hundred times as long.

    Args:
        key: The key.
        data: Its element, little-endian.
    """

    key: str
    data: bytes

    @property
    def box(self) -> Box:
        """All of the key."""
        return Box((), ())

    def to_row(self) -> list[object]:
        """A line of the table."""
        return [self.key, self.data.hex()]


Row = Chunk | Scalar


def table_bytes(header: TableHeader, rows: Iterable[Row]) -> bytes:
    """A table's content."""
    lines = [header.model_dump(mode="json"), *(row.to_row() for row in rows)]
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()


def read_table_header(path: AnyPath) -> TableHeader:
    """Read the first line of a table that has been verified, or is being written."""
    with opened(path) as file:
        return _header(path, file)


def read_table(path: AnyPath, keys: Mapping[str, KeyEntry]) -> Iterator[Row]:
    """The rows of a table, each checked against its key and its file.

    Raises:
        ManifestError: A chunk lies outside its file or its key, has another length than its box, or an unknown key; a
            number has a chunk, or a tensor's row its elements.
    """
    with opened(path) as file:
        header = _header(path, file)
        count = 0
        while line := file.readline(_MAX_LINE_BYTES):
            row = _row(path, line)
            entry = keys.get(row.key)
            if entry is None:
                raise malformed(path, "chunks of keys that the manifest lists", f"key {row.key!r}"[:300])
            if isinstance(row, Scalar):
                _check_scalar(path, row, entry)
            else:
                _check_chunk(path, row, header, entry)
            count += 1
            yield row
    if count != header.chunks:
        raise malformed(path, f"{header.chunks} chunks", f"{count}")


def _header(path: AnyPath, file: IO[bytes]) -> TableHeader:
    return validated(TableHeader, parse_json(path, file.readline(_MAX_LINE_BYTES)), path)


def _row(path: AnyPath, line: bytes) -> Row:
    try:
        row = ROW.validate_json(line)
        if len(row) == 2:
            return Scalar(row[0], bytes.fromhex(row[1]))
        key, file, offset, length, box_offset, box_size, digest, record_offset, record_length = row
        elements, record = ByteRange(offset, length), ByteRange(record_offset, record_length)
        return Chunk(key, file, elements, Box(box_offset, box_size), digest, record)
    except ValueError as error:
        raise _no_row(path, line, error) from error


def _no_row(path: AnyPath, line: bytes, error: ValueError) -> ManifestError:
    """The error for a line that is no row, by what it seems to be meant for."""
    row = parse_json(path, line)
    is_scalar = isinstance(row, list) and len(row) == 2
    fields = ", ".join(field["title"] for field in ROW.json_schema()["anyOf"][is_scalar]["prefixItems"])
    expected, found = f"a {'number' if is_scalar else 'chunk'}: {fields}", str(error)
    if isinstance(error, ValidationError):  # says what speaks against a chunk, then what speaks against a number
        first = error.errors()[-1 if is_scalar else 0]
        where = ".".join(map(str, first["loc"][1:]))
        found = f"field {where}: {first['msg']}" if where else first["msg"]
    return malformed(path, expected, f"{found}; {str(row)[:200]}")


def _check_scalar(path: AnyPath, scalar: Scalar, entry: KeyEntry) -> None:
    if entry.is_sharded:
        raise malformed(path, f"{scalar.key}: chunks in files, being sharded", "elements in the table")
    if entry.shape or len(scalar.data) != dtype_from_name(entry.dtype).itemsize:
        raise malformed(
            path, f"{scalar.key}: one {entry.dtype} of shape []", f"{entry.shape}, {len(scalar.data)} bytes"
        )


def _check_chunk(path: AnyPath, chunk: Chunk, header: TableHeader, entry: KeyEntry) -> None:
    if not entry.is_sharded:
        raise malformed(path, f"{chunk.key}: its element in the table, being of kind {entry.kind}", "a chunk in a file")
    if not chunk.box.inside(entry.shape):
        raise malformed(path, f"{chunk.key}: a box inside shape {entry.shape}", f"{chunk.box}"[:300])
    elements, record = chunk.elements, chunk.record
    if elements.length != chunk.box.volume * dtype_from_name(entry.dtype).itemsize:
        raise malformed(path, f"{chunk.key}: {chunk.box.volume} elements of {entry.dtype}", f"{elements.length} bytes")
    if chunk.file >= len(header.files):
        raise malformed(path, f"one of {len(header.files)} files", f"file {chunk.file}")
    if not (record.offset <= elements.offset and elements.end <= record.end <= header.files[chunk.file].size):
        raise malformed(path, f"{chunk.key}: bytes inside {header.files[chunk.file]}", f"{chunk}"[:500])
