# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Reading an index file: its directory as a whole, of its rows and its record what is asked for.

Everything is checked here, before any payload is opened: the layout against the file's size, boxes inside their keys,
bytes inside their files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import batched, chain

import numpy as np
import numpy.typing as npt

from mbridge_fsdp_ckpt.format import columns
from mbridge_fsdp_ckpt.format.columns import Array, Columns, key_hash
from mbridge_fsdp_ckpt.format.index_checks import Shapes, directory_defect, rows_defect, sharded_keys
from mbridge_fsdp_ckpt.format.manifest import validated
from mbridge_fsdp_ckpt.format.names import MANIFEST_NAME, Files
from mbridge_fsdp_ckpt.format.schema import IndexHeader, RankOwn
from mbridge_fsdp_ckpt.io.checksums import digest
from mbridge_fsdp_ckpt.io.files import malformed, parse_json
from mbridge_fsdp_ckpt.io.ranges import Bytes, OpenFiles
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.plan.keys import KeyEntry

_KEYS_AT_ONCE = 1000


class IndexFile:
    """An opened index file, of one rank or of a group.

    Args:
        path: The file.
        size: The size of the file, which the caller has checked.
        files: The save that it must be of.
        opened: Reads it.

    Raises:
        ManifestError: It contradicts the format, itself, or is of another save.
        DamagedCheckpointError: It is shorter than its size.
    """

    def __init__(self, path: AnyPath, size: int, files: Files, opened: OpenFiles) -> None:
        self.path, self._opened = path, opened
        self._found: dict[str, int | None] = {}
        self.prefix = _read_prefix(path, size, opened)
        header, directory = self._parsed(size)
        self.header = header
        if (header.save, header.suffix) != (files.save, files.suffix):
            raise malformed(
                path, f"the index of save {files.save}, as {MANIFEST_NAME} has it", f"that of save {header.save}"
            )
        take = _Cutter(directory)
        self.ranks = take(columns.RANK, header.ranks)
        coordinates = take(columns.COORDINATE, header.ranks * len(header.axes)).view(np.int64)
        self.coordinates = coordinates.reshape(header.ranks, len(header.axes))
        self.keys = take(columns.KEY, header.keys)
        self.names = take(columns.NAME, header.names)
        self.numbers = take(columns.NUMBER, header.numbers)
        self._checks = take(columns.CHECK, columns.block_count(header))
        self.texts = memoryview(directory[take.position : take.position + header.texts])
        if defect := directory_defect(header, self.ranks, self.keys, self.names, self.numbers):
            raise malformed(path, defect, "others")

    def _parsed(self, size: int) -> tuple[IndexHeader, Bytes]:
        header_end = len(self.prefix) - columns.PREAMBLE.unpack_from(self.prefix)[2]
        data, directory = self.prefix[columns.PREAMBLE.size : header_end], self.prefix[header_end:]
        header = validated(IndexHeader, parse_json(self.path, data.tobytes()), self.path)
        self._rows_at = len(self.prefix)
        implied = columns.directory_bytes(header), self._rows_at + columns.rows_bytes(header) + header.record
        if implied != (len(directory), size):
            raise malformed(self.path, "arrays as long as the header says", f"{len(directory)} and {size} bytes")
        return header, directory

    def text_of_key(self, place: int) -> str:
        """A key."""
        return self._text(self.keys["text"], place, 0)

    def text_of_name(self, place: int) -> str:
        """A name."""
        return self._text(self.names["text"], place, int(self.keys["text"][-1]) if len(self.keys) else 0)

    def _text(self, ends: npt.NDArray[np.uint64], place: int, base: int) -> str:
        begin = int(ends[place - 1]) if place else base
        try:
            return str(self.texts[begin : int(ends[place])], "utf-8")
        except UnicodeDecodeError as error:
            raise malformed(self.path, "keys and names in UTF-8", str(error)) from error

    def entry(self, place: int) -> KeyEntry:
        """A key's description."""
        return self.header.entries[int(self.keys["entry"][place])]

    def find(self, key: str) -> int | None:
        """A key's place among the keys, if it is one of them; a load asks for each several times."""
        if key not in self._found:
            self._found[key] = self._find(key)
        return self._found[key]

    def _find(self, key: str) -> int | None:
        hashed = np.uint64(key_hash(key.encode(errors="surrogatepass")))
        place = int(np.searchsorted(self.keys["hash"], hashed))
        if place == len(self.keys) or self.keys["hash"][place] != hashed:
            return None
        return place if self.text_of_key(place) == key else None

    def described(self, key: str) -> KeyEntry | None:
        """A key's description, if it is one of the keys."""
        place = self.find(key)
        return None if place is None else self.entry(place)

    def find_names(self, kind: int, name: str) -> range:
        """The places of a name of a kind; several ranks may have FP8 state of a module."""
        first, end = (int(n) for n in np.searchsorted(self.names["kind"], (kind, kind + 1)))
        hashed = np.uint64(key_hash(name.encode(errors="surrogatepass")))
        hashes = self.names["hash"][first:end]
        begin, stop = np.searchsorted(hashes, hashed, "left"), np.searchsorted(hashes, hashed, "right")
        found = range(first + int(begin), first + int(stop))
        return found if all(self.text_of_name(place) == name for place in found) else range(0)

    def number(self, place: int) -> bytes:
        """The bytes of a key's number."""
        number = self.numbers[int(self.keys["first"][place])]
        return bytes(number["data"].tobytes()[: int(number["bytes"])])

    def rows(self, places: Iterable[int]) -> Iterator[tuple[int, Array]]:
        """The rows of sharded keys, each key's checked; what lies together is read together.

        Args:
            places: The places of keys, in order.

        Raises:
            ManifestError: A row lies outside its key or its file, or the rows are not what was written.
        """
        for run in _runs(self.keys, places):
            first = int(self.keys["first"][run[0]])
            last = int(self.keys["first"][run[-1]]) + int(self.keys["count"][run[-1]])
            block = first // columns.BLOCK_ROWS
            rows = self._read_rows(block, -(-last // columns.BLOCK_ROWS))[first - block * columns.BLOCK_ROWS :]
            keys = self.keys[run]
            begins, counts = (keys["first"] - keys["first"][0]).astype(np.intp), keys["count"].astype(np.intp)
            theirs = np.repeat(begins - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
            self._check_rows(rows[theirs], keys, run)
            for place, begin, count in zip(run, begins.tolist(), counts.tolist(), strict=True):
                yield place, rows[begin : begin + count]

    def sharded_rows(self) -> Iterator[tuple[int, Array]]:
        """The rows of all sharded keys, a few blocks at a time; see `rows`."""
        for some in batched(np.flatnonzero(self.are_sharded).tolist(), _KEYS_AT_ONCE):
            yield from self.rows(some)

    def checked_rows(self) -> Array:
        """The rows of all sharded keys, one after the other, all at once; see `rows`."""
        rows, places = self.all_rows(), np.flatnonzero(self.are_sharded)
        self._check_rows(rows, self.keys[places], places.tolist())
        return rows

    def _check_rows(self, rows: Array, keys: Array, places: Sequence[int]) -> None:
        """Raise for the first bad one of some keys, which lie at these places."""
        defect = rows_defect(rows, keys, self._shapes, self.ranks["size"])
        if defect is not None:
            place = places[defect[0]]
            expected = defect[1].format(self.entry(place), self.keys["origins"][place])
            raise malformed(self.path, f"{self.text_of_key(place)}: {expected}"[:500], "another row")

    def all_numbers(self) -> Iterator[tuple[int, int, bytes]]:
        """The places of keys that are not sharded, each with the index of the rank that wrote its number, and this."""
        places = np.flatnonzero(~self.are_sharded)
        theirs = self.numbers[self.keys["first"][places].astype(np.intp)]
        data, width = theirs["data"].tobytes(), columns.NUMBER_BYTES
        each = zip(places.tolist(), theirs["rank"].tolist(), theirs["bytes"].tolist(), strict=True)
        for number, (place, rank, size) in enumerate(each):
            yield place, rank, data[number * width : number * width + size]

    def coordinates_of(self, number: int = 0) -> dict[str, int]:
        """The place of a rank."""
        places = zip(self.header.axes, self.coordinates[number].tolist(), strict=True)
        return {axis: place for axis, place in places if place >= 0}

    def ranks_at(self, place: Mapping[str, int], axes: Iterable[str]) -> list[int]:
        """The numbers of the ranks that are where a place is, along some axes."""
        found = np.ones(len(self.ranks), dtype=bool)
        for axis in axes:
            own = self.coordinates[:, self.header.axes.index(axis)] if axis in self.header.axes else -1
            found &= own == place.get(axis, -1)
        return list(np.flatnonzero(found).tolist())

    @cached_property
    def are_sharded(self) -> npt.NDArray[np.bool_]:
        """For each key, whether it has rows; else it has a number."""
        return sharded_keys(self.header.entries, self.keys)

    @cached_property
    def _shapes(self) -> Shapes:
        return Shapes.of(self.header)

    def all_rows(self) -> Array:
        """Every row, by key and offset."""
        return self._read_rows(0, columns.block_count(self.header))

    def _read_rows(self, block: int, end: int) -> Array:
        dtype = columns.row_dtype(self.header.dimensions)
        width = columns.BLOCK_ROWS * dtype.itemsize
        size = min(end * columns.BLOCK_ROWS, self.header.rows) * dtype.itemsize - block * width
        if size <= 0:
            return np.zeros(0, dtype=dtype)
        data = self._opened.read(self.path, self._rows_at + block * width, size)
        for number, start in enumerate(range(0, size, width), start=block):
            if digest(data[start : start + width]) != int(self._checks[number]):
                raise malformed(self.path, f"the rows that the checksum of block {number} covers", "others")
        return data.view(dtype)

    def record(self) -> RankOwn:
        """What a rank has as its own; nothing in the index file of a group.

        Raises:
            ManifestError: It is not what was written.
        """
        if not self.header.record:
            return RankOwn()
        data = self._opened.read(self.path, self._rows_at + columns.rows_bytes(self.header), self.header.record)
        if f"{digest(data):016x}" != self.header.record_checksum:
            raise malformed(self.path, "the record that its checksum covers", "another")
        return validated(RankOwn, parse_json(self.path, data.tobytes()), self.path)

    def without_its_hash(self) -> str | None:
        """A key or a name that is not found by its hash, if there is one; a load does not look at all of them."""
        keys = ((self.text_of_key(place), self.keys["hash"][place]) for place in range(len(self.keys)))
        names = ((self.text_of_name(place), self.names["hash"][place]) for place in range(len(self.names)))
        return next((text for text, hashed in chain(keys, names) if key_hash(text.encode()) != int(hashed)), None)

    def columns(self) -> Columns:
        """All of it but the record."""
        return Columns(
            save=self.header.save,
            suffix=self.header.suffix,
            axes=self.header.axes,
            entries=self.header.entries,
            ranks=self.ranks,
            coordinates=self.coordinates,
            keys=self.keys,
            names=self.names,
            numbers=self.numbers,
            texts=bytes(self.texts),
            rows=self.all_rows(),
        )


def _read_prefix(path: AnyPath, size: int, opened: OpenFiles) -> Bytes:
    """Preamble, header and directory, as the checksum covers them."""
    start = columns.PREAMBLE.size
    if size < start:
        raise malformed(path, f"an index file of at least {start} bytes", f"{size} bytes")
    preamble = opened.read(path, 0, start)
    magic, _, _, said = columns.PREAMBLE.unpack(preamble)
    length = columns.prefix_bytes(preamble)
    if magic != columns.MAGIC or length > size:
        raise malformed(path, "an index file whose header and directory lie inside it", f"{size} bytes")
    prefix = opened.read(path, 0, length)
    if not np.array_equal(prefix[:start], preamble) or digest(prefix[start:]) != said:
        raise malformed(path, "the header and directory that their checksum covers", "others")
    return prefix


class _Cutter:
    """Takes arrays off a directory, one after the other."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self._data, self.position = data, 0

    def __call__(self, dtype: np.dtype, count: int) -> Array:
        begin, self.position = self.position, self.position + count * dtype.itemsize
        return self._data[begin : self.position].view(dtype)


def _runs(keys: Array, places: Iterable[int]) -> list[list[int]]:
    """Keys whose rows lie in the same block or the next one, together."""
    runs: list[list[int]] = []
    for place in places:
        if runs:
            last = int(keys["first"][runs[-1][-1]] + keys["count"][runs[-1][-1]])
            if int(keys["first"][place]) // columns.BLOCK_ROWS <= -(-last // columns.BLOCK_ROWS):
                runs[-1].append(place)
                continue
        runs.append([place])
    return runs
