# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What must hold of an index file: each check says what it expects where it does not hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from mbridge_fsdp_ckpt.format import columns
from mbridge_fsdp_ckpt.format.columns import Array
from mbridge_fsdp_ckpt.format.schema import IndexHeader
from mbridge_fsdp_ckpt.format.sums import sums_bytes_of
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name
from mbridge_fsdp_ckpt.plan.keys import MAX_INT, KeyEntry

_Checked = Iterator[tuple[str, bool]]


def directory_defect(header: IndexHeader, ranks: Array, keys: Array, names: Array, numbers: Array) -> str | None:
    """What is expected of a directory and does not hold, if anything; see `Columns`."""
    checks = chain(
        _of_texts(header, keys, names),
        _of_ranks_and_names(header, ranks, names),
        _of_keys(header, keys),
        _of_numbers(header, ranks, keys, numbers),
    )
    return next((expected for expected, holds in checks if not holds), None)


def sharded_keys(entries: Sequence[KeyEntry], keys: Array) -> npt.NDArray[np.bool_]:
    """For each key, whether it has rows; else it has a number."""
    sharded = np.array([entry.is_sharded for entry in entries], dtype=bool)
    found: npt.NDArray[np.bool_] = sharded[keys["entry"]]
    return found


def _of_texts(header: IndexHeader, keys: Array, names: Array) -> _Checked:
    ends = np.concatenate((keys["text"], names["text"]))
    yield "texts in order, one of each key and name", _increases(ends) and (not len(ends) or bool(ends[0] > 0))
    yield "texts to the last byte", int(ends[-1] if len(ends) else 0) == header.texts


def _of_ranks_and_names(header: IndexHeader, ranks: Array, names: Array) -> _Checked:
    yield "each rank once, in order", len(ranks) > 0 and _increases(ranks["rank"])
    yield "no record where there are several ranks", len(ranks) == 1 or not header.record
    yield "payload of a possible size", bool(np.all(ranks["size"] <= MAX_INT))
    known = np.all(names["kind"] <= columns.PARAM_GROUP) and np.all(names["rank"] < len(ranks))
    yield "names of known kinds, of ranks of the file", bool(known)
    order = np.lexsort((names["hash"], names["kind"]))
    yield "names by kind and hash", bool(np.all(order[:-1] < order[1:]))


def _of_keys(header: IndexHeader, keys: Array) -> _Checked:
    yield "keys in the order of their hashes", _increases(keys["hash"])
    yield "a description of every key", bool(np.all(keys["entry"] < len(header.entries)))
    yield (
        f"tensors of at most {header.dimensions} dimensions, and numbers of none",
        all(len(entry.shape) <= (header.dimensions if entry.is_sharded else 0) for entry in header.entries),
    )
    sharded = sharded_keys(header.entries, keys)
    for mask, total in ((sharded, header.rows), (~sharded, header.numbers)):
        yield "rows and numbers of each key in order, and all of them", _follow(keys[mask], total)
    yield "one number of a key that has one", bool(np.all(keys["count"][~sharded] == 1))
    yield "no more first elements than rows", bool(np.all(keys["origins"] <= keys["count"]))


def _of_numbers(header: IndexHeader, ranks: Array, keys: Array, numbers: Array) -> _Checked:
    sizes = np.array([dtype_from_name(entry.dtype).itemsize for entry in header.entries], dtype=np.int64)
    fit = np.array_equal(numbers["bytes"], sizes[keys["entry"][~sharded_keys(header.entries, keys)]])
    yield "numbers as long as their dtype, of ranks of the file", fit and bool(np.all(numbers["rank"] < len(ranks)))


def _increases(numbers: npt.NDArray[np.uint64]) -> bool:
    return bool(np.all(numbers[:-1] < numbers[1:]))


def _follow(keys: Array, total: int) -> bool:
    """Whether the rows of keys follow each other without a gap, from the first to the last."""
    counts = keys["count"]
    if not len(keys) or np.any(counts == 0) or np.any(counts > total):
        return not len(keys) and total == 0
    ends = np.cumsum(counts)
    return np.array_equal(keys["first"], ends - counts) and int(ends[-1]) == total


@dataclass(frozen=True, slots=True)
class Shapes:
    """What rows are checked against, for each description of keys.

    Args:
        sizes: (entries, dimensions): the shape, filled up with zeros.
        dimensions: How many it has.
        itemsize: Bytes of an element.
    """

    sizes: npt.NDArray[np.uint64]
    dimensions: npt.NDArray[np.intp]
    itemsize: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, header: IndexHeader) -> Shapes:
        """Of a header's entries."""
        sizes = np.zeros((len(header.entries), header.dimensions), dtype=np.uint64)
        for number, entry in enumerate(header.entries):
            sizes[number, : len(entry.shape)] = entry.shape
        dimensions = np.array([len(entry.shape) for entry in header.entries], dtype=np.intp)
        itemsize = np.array([dtype_from_name(entry.dtype).itemsize for entry in header.entries], dtype=np.uint64)
        return cls(sizes, dimensions, itemsize)


def rows_defect(rows: Array, keys: Array, shapes: Shapes, payload: npt.NDArray[np.uint64]) -> tuple[int, str] | None:
    """What is expected of keys' rows and does not hold, if anything: boxes inside the key, bytes inside the file.

    Args:
        rows: Of the keys, one after the other.
        keys: The keys.
        shapes: Of their descriptions.
        payload: Sizes of the ranks' payload files.

    Returns:
        The first bad key among these, and what is expected, to be formatted with its description and its origins.
    """
    of_key = np.repeat(np.arange(len(keys)), keys["count"].astype(np.intp))
    for bad, expected in _of_rows(rows, keys, of_key, shapes, payload):
        if bad.any():
            return int(of_key[np.flatnonzero(bad)[0]]), expected
    return None


def _of_rows(
    rows: Array, keys: Array, of_key: npt.NDArray[np.intp], shapes: Shapes, payload: npt.NDArray[np.uint64]
) -> Iterator[tuple[npt.NDArray[np.bool_], str]]:
    entry, start, extent = keys["entry"][of_key], rows["start"], rows["extent"]
    shape = shapes.sizes[entry]
    unused = np.arange(shape.shape[1]) >= shapes.dimensions[entry][:, None]
    outside = (start > shape) | (extent > shape - start) | (unused & ((start > 0) | (extent > 0)))
    yield outside.any(axis=1), "boxes inside shape {0.shape}"
    yield rows["rank"] >= len(payload), "rows of the file's ranks"
    size = payload[rows["rank"]]
    beyond = (rows["length"] > size) | (rows["offset"] > size - rows["length"])
    yield beyond, "records inside their payload files"
    sides = np.where(unused, np.uint64(1), extent)
    roughly = np.prod(sides.astype(np.float64), axis=1) * shapes.itemsize[entry] + rows["lead"]
    elements = np.prod(sides, axis=1, dtype=np.uint64) * shapes.itemsize[entry]
    exactly = elements + rows["lead"] + sums_bytes_of(elements)
    yield (roughly > 2.0**62) | (exactly > rows["length"]), "elements of {0.dtype} inside their records, with sums"
    origins = np.bincount(of_key, ~start.any(axis=1), len(keys))
    yield (origins != keys["origins"])[of_key], "{1} rows with the first element"
