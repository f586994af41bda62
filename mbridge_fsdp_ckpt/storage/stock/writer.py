"""What stock needs to read a checkpoint of this format: `.metadata`, and its non-tensor values as stock pickles.

Made from the index in the directory, at commit or at any time later; this package never reads either.
Numbers that stand in the index get their records among the values.  Torch Distributed Checkpoint's on-disk classes
are used, not copied (torch 2.13, `checkpoint/metadata.py`).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.checkpoint import _nested_dict, filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from mbridge_fsdp_ckpt.plan.boxes import Box, whole
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name
from mbridge_fsdp_ckpt.plan.keys import KeyEntry, name_and_slot
from mbridge_fsdp_ckpt.storage.entries import FileEntry
from mbridge_fsdp_ckpt.storage.files import replace_file
from mbridge_fsdp_ckpt.storage.format.columns import Array, box_of
from mbridge_fsdp_ckpt.storage.format.names import DCP_METADATA, payload_name
from mbridge_fsdp_ckpt.storage.format.payload import PayloadWriter
from mbridge_fsdp_ckpt.storage.format.reader import SafeSource
from mbridge_fsdp_ckpt.storage.store import AnyPath


def write_dcp_view(
    directory: AnyPath,
    source: SafeSource,
    values: Mapping[str, Any],
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Write `.metadata` and the values file.

    Args:
        directory: Where to write them.
        source: The checkpoint.
        values: Non-tensor state of all ranks, nested as stock nests it.
        progress: Called after each index file.
    """
    view = _View()
    merged: dict[str, Any] = dict(values)
    for group in source.index.groups:
        payload = [source.files.payload(rank) for rank in group.ranks["rank"].tolist()]
        for place, rows in group.sharded_rows():
            view.add_rows(group.text_of_key(place), group.entry(place), rows, payload)
        for place, _ in group.ranks_of_numbers():
            view.add_number(group.text_of_key(place), group.entry(place), group.number(place))
        progress()
    for record in source.ranks():
        states = (record.values or {}).get("rng_state")
        if isinstance(states, Mapping):  # by place, as stock has it; a caller of `save` may have another
            merged["rng_state"] = {**states, **merged.get("rng_state", {})}
        progress()
    groups = source.hyperparameters()
    if groups:
        merged["optimizer"] = {"param_to_group_meta": groups}
    view.add_values(directory / payload_name(0, source.files.suffix, file=1), merged)
    replace_file(directory / DCP_METADATA, pickle.dumps(view.metadata()))


class _View:
    def __init__(self) -> None:
        self._state: dict[str, Any] = {}
        self._storage: dict[MetadataIndex, filesystem._StorageInfo] = {}
        self._paths: dict[str, tuple[Any, ...]] = {}
        self._numbers: dict[tuple[str, bytes], list[str]] = {}
        self._properties: dict[torch.dtype, TensorProperties] = {}  # a pickle says once what many refer to

    def add_rows(self, key: str, entry: KeyEntry, rows: Array, files: Sequence[str]) -> None:
        self._paths[key] = _path_of(key)
        dtype, dimensions = dtype_from_name(entry.dtype), len(entry.shape)
        for row in rows:
            place = files[row["rank"]], int(row["offset"]), int(row["length"])
            self._add(key, dtype, entry.shape, box_of(row, dimensions), place)

    def add_number(self, key: str, entry: KeyEntry, data: bytes) -> None:
        """Equal numbers share a record in the values file, which `add_values` writes."""
        self._paths[key] = _path_of(key)
        self._numbers.setdefault((entry.dtype, data), []).append(key)

    def _add(self, key: str, dtype: torch.dtype, shape: tuple[int, ...], box: Box, place: tuple[str, int, int]) -> None:
        if dtype not in self._properties:
            self._properties[dtype] = TensorProperties(dtype=dtype)
        tensor = self._state.setdefault(key, TensorStorageMetadata(self._properties[dtype], _size(shape), []))
        tensor.chunks.append(ChunkStorageMetadata(_size(box.offset), _size(box.size)))
        self._storage[MetadataIndex(key, box.offset)] = filesystem._StorageInfo(*place)

    def add_values(self, path: AnyPath, values: Mapping[str, Any]) -> FileEntry:
        """Tensors become chunks, the rest pickles; equal numbers and equal pickles are written once."""
        flat, paths = _nested_dict.flatten_state_dict(dict(values))
        self._paths |= paths
        writer = PayloadWriter(path)
        for (name, data), keys in self._numbers.items():
            dtype = dtype_from_name(name)
            chunk = writer.add(keys[0], torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype), whole(()))
            for key in keys:
                self._add(key, dtype, (), chunk.box, (path.name, *chunk.record))
        pickles, value_is_bytes = _Pickles(writer, path.name), BytesStorageMetadata()
        for key, value in flat.items():
            if isinstance(value, torch.Tensor):
                chunk = writer.add(key, value.reshape(-1), whole(tuple(value.shape)))
                self._add(key, value.dtype, tuple(value.shape), chunk.box, (path.name, *chunk.record))
                continue
            self._state[key] = value_is_bytes
            self._storage[MetadataIndex(key)] = pickles.place_of(value)
        return writer.close()

    def metadata(self) -> Metadata:
        return Metadata(
            state_dict_metadata=self._state,
            planner_data=self._paths,
            storage_data=self._storage,
            storage_meta=StorageMeta(),
            version=filesystem.CURRENT_DCP_VERSION,
        )


class _Pickles:
    """Pickles in the values file: equal ones are written once, and a value that many have is pickled once.

    Args:
        writer: Of the file.
        name: Its name.
    """

    def __init__(self, writer: PayloadWriter, name: str) -> None:
        self._writer, self._name = writer, name
        self._by_value: dict[int, tuple[Any, filesystem._StorageInfo]] = {}  # with the value: nobody else gets its id
        self._by_pickle: dict[bytes, filesystem._StorageInfo] = {}

    def place_of(self, value: Any) -> filesystem._StorageInfo:
        """Where a value's pickle lies."""
        if id(value) in self._by_value:
            return self._by_value[id(value)][1]
        buffer = io.BytesIO()
        torch.save(value, buffer)
        data = buffer.getvalue()
        if data not in self._by_pickle:
            self._by_pickle[data] = filesystem._StorageInfo(self._name, self._writer.position, len(data))
            self._writer.append(data)
        self._by_value[id(value)] = value, self._by_pickle[data]
        return self._by_pickle[data]


@lru_cache(maxsize=1 << 16)
def _size(numbers: tuple[int, ...]) -> torch.Size:
    return torch.Size(numbers)


def _path_of(key: str) -> tuple[str, ...]:
    """Where stock nests a tensor: ("model", name) or ("optimizer", "state", name, slot)."""
    if slot_key := name_and_slot(key):
        name, slot = slot_key
        return "optimizer", "state", name, slot
    return tuple(key.split(".", 1))
