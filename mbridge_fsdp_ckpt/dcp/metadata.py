# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`.metadata`, which stock reads a checkpoint by, and what it says as plain data.

It says where records lie, which in a training is the same save after save, as long as no value changes its size: the
bytes of the last one are kept, and taken again where they say what is to be said.  Torch Distributed Checkpoint's
on-disk classes are used, not copied (torch 2.13, `checkpoint/metadata.py`).
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from mbridge_fsdp_ckpt.errors import UnsupportedStateError
from mbridge_fsdp_ckpt.format import columns
from mbridge_fsdp_ckpt.format.index import IndexFile
from mbridge_fsdp_ckpt.format.sums import sums_bytes
from mbridge_fsdp_ckpt.plan.boxes import Shape
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name
from mbridge_fsdp_ckpt.plan.keys import KeyEntry, name_and_slot
from mbridge_fsdp_ckpt.remedies import remedy

KeyPath = tuple[str | int, ...]
"""Where stock nests a value; its key are the parts, with dots between them."""

_KEPT = 1 << 23  # bytes of rows of which `.metadata` is kept, twice as many: 100,000 chunks, rank 0's memory alone


class Record(NamedTuple):
    """A record of a file: its first byte there, and how many it has."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value of one record, or several equal ones.

    Args:
        below: The path of the value below each of its parents.
        record: The record that holds the value.
        dtype: The dtype of a tensor; None for a pickle.
        shape: The shape of a tensor.
    """

    below: KeyPath
    record: Record
    dtype: torch.dtype | None = None
    shape: Shape = ()


@dataclass(frozen=True, slots=True)
class Values:
    """What is not sharded.

    Args:
        parents: Below each of them is each of the leaves.
        leaves: These.
    """

    parents: tuple[KeyPath, ...]
    leaves: tuple[Leaf, ...]


@dataclass(frozen=True, slots=True)
class Sharded:
    """The sharded tensors of an index file.

    Args:
        keys: Theirs.
        described: For each key the number of its description, and how many rows it has.
        entries: The descriptions.
        rows: Of all keys, one after the other, as `columns.row_dtype` lays them out, without their checksums.
        dimensions: The number of dimensions of the rows' boxes.
        files: The payload file of each rank that the rows name.
    """

    keys: tuple[str, ...]
    described: tuple[tuple[int, int], ...]
    entries: tuple[KeyEntry, ...]
    rows: bytes
    dimensions: int
    files: tuple[str, ...]

    @staticmethod
    def of(index: IndexFile, files: Sequence[str]) -> Sharded:
        """What an index file says.

        Raises:
            ManifestError: Its rows contradict the format.
        """
        rows, places = index.checked_rows(), np.flatnonzero(index.are_sharded)
        rows["checksum"] = 0
        keys = index.keys[places]
        return Sharded(
            keys=tuple(map(index.text_of_key, places.tolist())),
            described=tuple(zip(keys["entry"].tolist(), keys["count"].tolist(), strict=True)),
            entries=tuple(index.header.entries),
            rows=rows.tobytes(),
            dimensions=index.header.dimensions,
            files=tuple(files),
        )


def metadata_bytes(sharded: Sequence[Sharded], values: Sequence[Values]) -> bytes:
    """The content of `.metadata`.

    Raises:
        UnsupportedStateError: Two values have one key.
    """
    make = _kept if sum(len(part.rows) for part in sharded) <= _KEPT else _made
    return make(tuple(sharded), tuple(values))


def _made(sharded: tuple[Sharded, ...], values: tuple[Values, ...]) -> bytes:
    view = _View()
    for part in sharded:
        view.add_sharded(part)
    for some in values:
        view.add_values(some)
    return pickle.dumps(view.metadata())


_kept = lru_cache(maxsize=1)(_made)


class _View:
    def __init__(self) -> None:
        self._state: dict[str, Any] = {}
        self._storage: dict[MetadataIndex, filesystem._StorageInfo] = {}
        self._paths: dict[str, KeyPath] = {}
        # a pickle says once what many refer to
        self._properties, self._size, self._info = cache(TensorProperties), cache(torch.Size), cache(_info)
        self._bytes = BytesStorageMetadata()

    def add_sharded(self, part: Sharded) -> None:
        rows = np.frombuffer(part.rows, dtype=columns.row_dtype(part.dimensions))
        names = "rank", "offset", "length", "start", "extent"
        each = zip(*(rows[name].tolist() for name in names), strict=True)
        for key, (entry, count) in zip(part.keys, part.described, strict=True):
            described = part.entries[entry]
            dtype, dimensions = dtype_from_name(described.dtype), len(described.shape)
            tensor = self._tensor(key, path_of(key), dtype, described.shape)
            for rank, offset, length, start, extent in islice(each, count):
                size = tuple(extent[:dimensions])
                record = length - sums_bytes(math.prod(size) * dtype.itemsize)  # stock's: our sums follow it
                info = filesystem._StorageInfo(part.files[rank], offset, record)
                self._add_chunk(key, tensor, tuple(start[:dimensions]), size, info)

    def add_values(self, values: Values) -> None:
        for parent in values.parents:
            for leaf in values.leaves:
                path = *parent, *leaf.below
                key = ".".join(map(str, path))
                if leaf.dtype is None:
                    self._add(key, path, self._bytes)
                    self._storage[MetadataIndex(key)] = self._info(leaf.record)
                else:
                    tensor = self._tensor(key, path, leaf.dtype, leaf.shape)
                    self._add_chunk(key, tensor, (0,) * len(leaf.shape), leaf.shape, self._info(leaf.record))

    def _tensor(self, key: str, path: KeyPath, dtype: torch.dtype, shape: Shape) -> TensorStorageMetadata:
        """The entry of a tensor; several index files may have rows of one."""
        found = self._state.get(key)
        if isinstance(found, TensorStorageMetadata):
            return found
        tensor = TensorStorageMetadata(self._properties(dtype), self._size(shape), [])
        self._add(key, path, tensor)
        return tensor

    def _add(self, key: str, path: KeyPath, entry: TensorStorageMetadata | BytesStorageMetadata) -> None:
        if key in self._state:
            raise UnsupportedStateError(
                expected="one value of each name, as DCP metadata requires",
                found="two values with the same name",
                remedy=remedy(
                    "Give the value another name.",
                    "Or save without DCP metadata, which {dcp_metadata} chooses.",
                    "Nothing was committed.",
                ),
                key=key,
            )
        self._state[key], self._paths[key] = entry, path

    def _add_chunk(
        self, key: str, tensor: TensorStorageMetadata, start: Shape, extent: Shape, info: filesystem._StorageInfo
    ) -> None:
        offset = self._size(start)
        tensor.chunks.append(ChunkStorageMetadata(offset, self._size(extent)))
        self._storage[MetadataIndex(key, offset)] = info

    def metadata(self) -> Metadata:
        return Metadata(
            state_dict_metadata=self._state,
            planner_data=self._paths,
            storage_data=self._storage,
            storage_meta=StorageMeta(),
            version=filesystem.CURRENT_DCP_VERSION,
        )


def _info(record: Record) -> filesystem._StorageInfo:
    return filesystem._StorageInfo(*record)


def path_of(key: str) -> KeyPath:
    """Where stock nests a tensor: ("model", name) or ("optimizer", "state", name, slot)."""
    if slot_key := name_and_slot(key):
        name, slot = slot_key
        return "optimizer", "state", name, slot
    return tuple(key.split(".", 1))
