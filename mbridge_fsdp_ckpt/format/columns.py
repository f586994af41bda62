# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What an index file holds, as arrays of a fixed little-endian layout, and their way to bytes and back.

    preamble    magic, bytes of the header, bytes of the directory, checksum of both
    header      JSON: how long each array is, and the distinct descriptions of keys
    directory   ranks, coordinates, keys, names, numbers, checksums of blocks of rows, texts
    rows        one a chunk, sorted by key: read in blocks of `BLOCK_ROWS`, each with a checksum in the directory
    record      JSON, in a rank's own index file: the values of that rank

Everything but rows and record is read and checked as a whole; of these, what is asked for.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Buffer, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mbridge_fsdp_ckpt.format.rows import Chunk
from mbridge_fsdp_ckpt.format.schema import IndexHeader
from mbridge_fsdp_ckpt.io.checksums import digest
from mbridge_fsdp_ckpt.io.ranges import ByteRange
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name
from mbridge_fsdp_ckpt.plan.keys import KeyEntry

Array = npt.NDArray[np.void]
"""Of one of the dtypes below."""

MAGIC = b"FSDPSAFE"
PREAMBLE = struct.Struct("<8sQQQ")
BLOCK_ROWS = 64
NUMBER_BYTES = 16

RANK = np.dtype([("rank", "<u8"), ("size", "<u8"), ("checksum", "<u8")])
KEY = np.dtype(
    [("hash", "<u8"), ("first", "<u8"), ("count", "<u8"), ("text", "<u8"), ("entry", "<u4"), ("origins", "<u4")]
)
NAME = np.dtype([("kind", "<u4"), ("rank", "<u4"), ("hash", "<u8"), ("value", "<u8"), ("text", "<u8")])
NUMBER = np.dtype([("rank", "<u4"), ("bytes", "<u4"), ("data", "u1", (NUMBER_BYTES,))])
CHECK = np.dtype("<u8")
COORDINATE = np.dtype("<i8")

_MANY = 8  # rows of a key, of which an array finds those that are wanted sooner

PARAMETER, STATELESS, STATE, PARAM_GROUP = range(4)
"""Kinds of names: an optimizer parameter with its hyperparameters, one without state, FP8 state of a module, and a
param group of a rank's optimizer, see `param_group_name`."""


def row_dtype(dimensions: int) -> np.dtype[np.void]:
    """Of rows of boxes of up to so many dimensions."""
    box = [(name, "<u8", (max(1, dimensions),)) for name in ("start", "extent")]
    fixed = [("rank", "<u4"), ("lead", "<u4"), ("offset", "<u8"), ("length", "<u8"), ("checksum", "<u8")]
    return np.dtype([*fixed, *box])


def box_of(row: np.void, dimensions: int) -> Box:
    """The box of a row."""
    return Box(tuple(row["start"][:dimensions].tolist()), tuple(row["extent"][:dimensions].tolist()))


def chunks_of(
    key: str, rows: Array, entry: KeyEntry, boxes: Sequence[Box] | None = None
) -> Iterator[tuple[int, Chunk]]:
    """The chunks of a key that have elements of some boxes, or all, each with the index of the rank that its row names.

    Args:
        key: The key.
        rows: The rows of the key.
        entry: The description of the key.
        boxes: These; None for all.
    """
    dimensions, itemsize = len(entry.shape), dtype_from_name(entry.dtype).itemsize
    touching = rows if boxes is None or len(rows) < _MANY else rows[_touching(rows, boxes, dimensions)]
    for rank, lead, offset, length, checksum, start, extent in touching.tolist():
        box = Box(tuple(start[:dimensions].tolist()), tuple(extent[:dimensions].tolist()))
        if boxes is None or any(map(box.intersect, boxes)):
            yield rank, Chunk(key, box, ByteRange(offset, length), lead, box.volume * itemsize, checksum)


def _touching(rows: Array, boxes: Sequence[Box], dimensions: int) -> npt.NDArray[np.bool_]:
    """The rows that have elements of one of the boxes."""
    begin, extent = rows["start"][:, :dimensions], rows["extent"][:, :dimensions]
    found = np.zeros(len(rows), dtype=bool)
    for box in boxes:
        low, high = np.array(box.offset, dtype=np.uint64), np.array(box.end, dtype=np.uint64)
        found |= np.all((begin < high) & (low < begin + extent), axis=1)
    return found


@dataclass(frozen=True, slots=True)
class Columns:
    """The arrays of an index file.

    Args:
        save: The token of the save, which no other save has.
        suffix: The end of the names of the save's files.
        axes: Names of the coordinates.
        entries: Distinct descriptions of keys.
        ranks: Writing ranks in order, each with the size and checksum of its payload; of size 0 where there is none.
        coordinates: (ranks, axes): each rank's place; -1 where it has none along an axis.
        keys: By hash: where a key's rows, or its number, begin and how many there are, where its text ends, its entry,
            and how many of its rows hold its first element.
        names: By kind and hash, each with the index of the rank that has it; a parameter's and a param group's with
            the checksum of their hyperparameters.
        numbers: Values of keys that are not sharded.
        texts: The texts of keys and names, in order.
        rows: By key and offset.
        record: JSON of a rank's own values; empty in the file of a group of several.
    """

    save: str
    suffix: str
    axes: tuple[str, ...]
    entries: tuple[KeyEntry, ...]
    ranks: Array
    coordinates: npt.NDArray[np.int64]
    keys: Array
    names: Array
    numbers: Array
    texts: bytes
    rows: Array
    record: bytes = field(default=b"")

    def to_bytes(self) -> bytes:
        """The file."""
        rows = self.rows.tobytes()
        checks = np.array(list(_block_checks(rows, self.rows.dtype.itemsize)), dtype=CHECK)
        arrays = self.ranks, self.coordinates, self.keys, self.names, self.numbers, checks
        directory = b"".join(array.tobytes() for array in arrays) + _padded(self.texts, b"\0")
        header = IndexHeader(
            save=self.save,
            suffix=self.suffix,
            axes=self.axes,
            entries=self.entries,
            dimensions=self.rows.dtype["start"].shape[0],
            ranks=len(self.ranks),
            keys=len(self.keys),
            names=len(self.names),
            numbers=len(self.numbers),
            rows=len(self.rows),
            texts=len(self.texts),
            record=len(self.record),
            record_checksum=f"{digest(self.record):016x}",
        )
        text = json.dumps(header.model_dump(mode="json"), separators=(",", ":"))
        prefix = _padded(text.encode(), b" ")
        preamble = PREAMBLE.pack(MAGIC, len(prefix), len(directory), digest(prefix + directory))
        return b"".join((preamble, prefix, directory, rows, self.record))


def _block_checks(rows: bytes, width: int) -> Iterable[int]:
    for start in range(0, len(rows), BLOCK_ROWS * width):
        yield digest(memoryview(rows)[start : start + BLOCK_ROWS * width])


def _padded(data: bytes, by: bytes) -> bytes:
    return data + by * (-len(data) % 8)


def prefix_bytes(preamble: Buffer) -> int:
    """Bytes of preamble, header and directory, of an index file that begins so."""
    _, header, directory, _ = PREAMBLE.unpack_from(preamble)
    return PREAMBLE.size + int(header) + int(directory)


def directory_bytes(header: IndexHeader) -> int:
    """Bytes of the directory that a header promises."""
    fixed = header.ranks * (RANK.itemsize + COORDINATE.itemsize * len(header.axes)) + header.keys * KEY.itemsize
    fixed += header.names * NAME.itemsize + header.numbers * NUMBER.itemsize + block_count(header) * CHECK.itemsize
    return fixed + header.texts + -header.texts % 8


def block_count(header: IndexHeader) -> int:
    """Blocks of rows."""
    return -(-header.rows // BLOCK_ROWS)


def rows_bytes(header: IndexHeader) -> int:
    """Bytes of all rows."""
    return header.rows * row_dtype(header.dimensions).itemsize


def param_group_name(parameters: Iterable[str]) -> str:
    """What tells a param group of a rank's optimizer from all others: a hash of the names of its parameters."""
    return f"{digest('\n'.join(sorted(parameters)).encode()):016x}"


def key_hash(text: bytes) -> int:
    """What a key is looked up by."""
    return digest(text)
