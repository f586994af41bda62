# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The index file that each rank writes of its own payload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mbridge_fsdp_ckpt.errors import UnsupportedStateError
from mbridge_fsdp_ckpt.format import columns
from mbridge_fsdp_ckpt.format.columns import Array, Columns, key_hash
from mbridge_fsdp_ckpt.format.names import Files
from mbridge_fsdp_ckpt.format.rows import Chunk, Row, Scalar
from mbridge_fsdp_ckpt.format.schema import MAX_RECORD_BYTES, RankOwn
from mbridge_fsdp_ckpt.io.checksums import as_number
from mbridge_fsdp_ckpt.io.entries import FileEntry
from mbridge_fsdp_ckpt.plan.keys import KeyEntry


@dataclass(frozen=True, slots=True)
class RankIndex:
    """What one rank says of itself and of what it wrote.

    Args:
        rank: The rank.
        coordinates: The rank's place along each axis.
        payload: The rank's payload file; None if it writes no chunks.
        keys: The descriptions of all keys that it has rows of.
        parameters: Optimizer parameters of which this rank writes the first element, with the checksum of their
            hyperparameters.
        stateless: Optimizer parameters without state.
        states: Modules whose FP8 state is in `own`.
        own: Values that are its own.
        param_groups: Of its optimizer, by `param_group_name`, with the checksum of their hyperparameters.
    """

    rank: int
    coordinates: Mapping[str, int]
    payload: FileEntry | None
    keys: Mapping[str, KeyEntry]
    parameters: Mapping[str, int] = field(default_factory=dict)
    stateless: Sequence[str] = ()
    states: Sequence[str] = ()
    own: RankOwn = field(default_factory=RankOwn)
    param_groups: Mapping[str, int] = field(default_factory=dict)


def own_index(index: RankIndex, rows: Iterable[Row], files: Files) -> Columns:
    """The arrays of a rank's index file.

    Args:
        index: The content of the rank's index file besides rows.
        rows: The rows of all keys of the rank, in any order, with copies of scalars.
        files: The save.

    Raises:
        UnsupportedStateError: Its values are too large.
    """
    by_key: dict[str, list[Row]] = {key: [] for key in index.keys}
    for row in rows:
        by_key[row.key].append(row)
    entries, entry_of = _entries(index.keys)
    chunks: list[Chunk] = []
    numbers: list[Scalar] = []
    text, described = bytearray(), list[tuple[int, ...]]()
    for hashed, key in sorted((key_hash(key.encode()), key) for key in by_key):
        held = by_key[key]
        if len(held) > 1:
            held.sort(key=lambda row: row.box.offset)
        text += key.encode()
        first = len(chunks) if index.keys[key].is_sharded else len(numbers)
        origins = sum(row.counts if isinstance(row, Scalar) else not any(row.box.offset) for row in held)
        described.append((hashed, first, len(held), len(text), entry_of[key], origins))
        chunks += [row for row in held if isinstance(row, Chunk)]
        numbers += [row for row in held if isinstance(row, Scalar)]
    keys = np.array(described, dtype=columns.KEY)
    names = _names(index, text)
    payload = (index.payload.size, as_number(index.payload.checksum)) if index.payload else (0, 0)
    return Columns(
        save=files.save,
        suffix=files.suffix,
        axes=tuple(index.coordinates),
        entries=entries,
        ranks=np.array([(index.rank, *payload)], dtype=columns.RANK),
        coordinates=np.array([list(index.coordinates.values())], dtype=columns.COORDINATE),
        keys=keys,
        names=names,
        numbers=_number_array(numbers),
        texts=bytes(text),
        rows=_row_array(chunks),
        record=_record(index),
    )


def _entries(keys: Mapping[str, KeyEntry]) -> tuple[tuple[KeyEntry, ...], dict[str, int]]:
    """The distinct descriptions, and the number of each key's; keys that are alike mostly share one object."""
    numbers: dict[KeyEntry, int] = {}
    of_object = {id(entry): entry for entry in keys.values()}
    number_of = {place: numbers.setdefault(entry, len(numbers)) for place, entry in of_object.items()}
    return tuple(numbers), {key: number_of[id(entry)] for key, entry in keys.items()}


def _record(index: RankIndex) -> bytes:
    record = index.own.model_dump_json().encode()
    if len(record) > MAX_RECORD_BYTES:
        raise UnsupportedStateError(
            expected=f"values of a rank of at most {MAX_RECORD_BYTES} bytes, encoded",
            found=f"{len(record)}",
            remedy="Save large tensors in the model or the optimizer, not in rank_values. Nothing was committed.",
            rank=index.rank,
        )
    return record


def _names(index: RankIndex, text: bytearray) -> Array:
    said = [(columns.PARAMETER, name, value) for name, value in index.parameters.items()]
    said += [(columns.PARAM_GROUP, name, value) for name, value in index.param_groups.items()]
    said += [(columns.STATELESS, name, 0) for name in index.stateless]
    said += [(columns.STATE, name, 0) for name in index.states]
    encoded = [(kind, key_hash(data := name.encode()), data, value) for kind, name, value in said]
    names = np.zeros(len(encoded), dtype=columns.NAME)
    for place, (kind, hashed, data, value) in enumerate(sorted(encoded)):
        text += data
        names[place] = kind, 0, hashed, value, len(text)
    return names


def _number_array(numbers: Sequence[Scalar]) -> Array:
    array = np.zeros(len(numbers), dtype=columns.NUMBER)
    for place, number in enumerate(numbers):
        padded = number.data.ljust(columns.NUMBER_BYTES, b"\0")
        array[place] = 0, len(number.data), np.frombuffer(padded, dtype=np.uint8)
    return array


def _row_array(chunks: Sequence[Chunk]) -> Array:
    dimensions = max((1, *(len(chunk.box.offset) for chunk in chunks)))
    array = np.zeros(len(chunks), dtype=columns.row_dtype(dimensions))
    if chunks:
        array["lead"] = [chunk.lead for chunk in chunks]
        array["offset"] = [chunk.record.offset for chunk in chunks]
        array["length"] = [chunk.record.length for chunk in chunks]
        array["checksum"] = np.array([chunk.checksum for chunk in chunks], dtype=np.uint64)
        array["start"] = _boxes([chunk.box.offset for chunk in chunks], dimensions)
        array["extent"] = _boxes([chunk.box.size for chunk in chunks], dimensions)
    return array


def _boxes(shapes: Sequence[tuple[int, ...]], dimensions: int) -> npt.NDArray[np.uint64]:
    return np.array([(*shape, *(0,) * (dimensions - len(shape))) for shape in shapes], dtype=np.uint64)
