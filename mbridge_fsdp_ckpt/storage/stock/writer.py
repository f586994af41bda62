"""What stock needs to read a checkpoint of this format: `.metadata`, and its non-tensor values as stock pickles.

Made from the chunk tables in the directory, at commit or at any time later; this package never reads either.
Numbers that stand in the tables get their records among the values.  Torch Distributed Checkpoint's on-disk classes
are used, not copied (torch 2.13, `checkpoint/metadata.py`).
"""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable, Iterable, Mapping
from functools import cache
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
from mbridge_fsdp_ckpt.storage.format.names import DCP_METADATA, payload_name
from mbridge_fsdp_ckpt.storage.format.payload import PayloadWriter
from mbridge_fsdp_ckpt.storage.format.table import Chunk, Scalar, read_table, read_table_header
from mbridge_fsdp_ckpt.storage.format.values import decode
from mbridge_fsdp_ckpt.storage.store import AnyPath

_log = logging.getLogger(__name__)


def write_dcp_view(
    directory: AnyPath,
    keys: Mapping[str, KeyEntry],
    tables: Iterable[AnyPath],
    values: Mapping[str, Any],
    suffix: str = "",
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Write `.metadata` and the values file.

    Args:
        directory: A directory whose chunk tables are complete.
        keys: All keys.
        tables: All chunk tables.
        values: Non-tensor state of all ranks, nested as stock nests it.
        suffix: What the values file's name ends with.
        progress: Called after each table.
    """
    view = _View()
    merged: dict[str, Any] = dict(values)
    groups: dict[str, Any] = {}
    for table in tables:
        header = read_table_header(table)
        for row in read_table(table, dict(keys)):
            if isinstance(row, Scalar):
                view.add_scalar(row, keys[row.key])
            else:
                view.add_chunk(row, keys[row.key], header.files[row.file].name)
        for group in header.parameter_groups:
            groups.update(dict.fromkeys(group.parameters, group.hyperparameters))
        states = (decode(header.values) or {}).get("rng_state")
        if isinstance(states, Mapping):  # by place, as stock has it; a caller of `save` may have another
            merged["rng_state"] = {**states, **merged.get("rng_state", {})}
        progress()
    if groups:
        decoded = {name: decode(hyperparameters) for name, hyperparameters in groups.items()}
        merged["optimizer"] = {"param_to_group_meta": decoded}
    view.add_values(directory / payload_name(0, suffix, file=1), merged)
    replace_file(directory / DCP_METADATA, pickle.dumps(view.metadata()))


@cache
def say_view_left_out(chunks: int) -> None:
    """Say once that stock cannot read what a job saves."""
    _log.warning(
        "stock's view (.metadata) is left out of saves of %d chunks: it would cost rank 0 some %d seconds each. "
        'Say dcp_metadata="always" if stock is to read them, or make it later: mbridge_fsdp_ckpt repair --stock-view',
        chunks,
        chunks // 20_000,
    )


class _View:
    def __init__(self) -> None:
        self._state: dict[str, Any] = {}
        self._storage: dict[MetadataIndex, filesystem._StorageInfo] = {}
        self._paths: dict[str, tuple[Any, ...]] = {}
        self._scalars: dict[tuple[str, bytes], list[str]] = {}

    def add_chunk(self, chunk: Chunk, entry: KeyEntry, file: str) -> None:
        self._paths[chunk.key] = _path_of(chunk.key)
        self._add(chunk.key, dtype_from_name(entry.dtype), entry.shape, chunk.box, (file, *chunk.record))

    def add_scalar(self, scalar: Scalar, entry: KeyEntry) -> None:
        """Equal numbers share a record in the values file, which `add_values` writes."""
        self._paths[scalar.key] = _path_of(scalar.key)
        self._scalars.setdefault((entry.dtype, scalar.data), []).append(scalar.key)

    def _add(self, key: str, dtype: torch.dtype, shape: tuple[int, ...], box: Box, place: tuple[str, int, int]) -> None:
        properties = TensorProperties(dtype=dtype)
        tensor = self._state.setdefault(key, TensorStorageMetadata(properties, torch.Size(shape), []))
        tensor.chunks.append(ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size)))
        self._storage[MetadataIndex(key, box.offset)] = filesystem._StorageInfo(*place)

    def add_values(self, path: AnyPath, values: Mapping[str, Any]) -> FileEntry:
        """Tensors become chunks, the rest pickles; equal numbers and equal pickles are written once."""
        flat, paths = _nested_dict.flatten_state_dict(dict(values))
        self._paths |= paths
        writer = PayloadWriter(path)
        for (name, data), keys in self._scalars.items():
            dtype = dtype_from_name(name)
            chunk = writer.add(keys[0], torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype), whole(()))
            for key in keys:
                self._add(key, dtype, (), chunk.box, (path.name, *chunk.record))
        seen: dict[bytes, tuple[int, int]] = {}
        for key, value in flat.items():
            if isinstance(value, torch.Tensor):
                chunk = writer.add(key, value.reshape(-1), whole(tuple(value.shape)))
                self._add(key, value.dtype, tuple(value.shape), chunk.box, (path.name, *chunk.record))
                continue
            buffer = io.BytesIO()
            torch.save(value, buffer)
            data = buffer.getvalue()
            if data not in seen:
                seen[data] = writer.position, len(data)
                writer.append(data)
            self._state[key] = BytesStorageMetadata()
            self._storage[MetadataIndex(key)] = filesystem._StorageInfo(path.name, *seen[data])
        return writer.close()

    def metadata(self) -> Metadata:
        return Metadata(
            state_dict_metadata=self._state,
            planner_data=self._paths,
            storage_data=self._storage,
            storage_meta=StorageMeta(),
            version=filesystem.CURRENT_DCP_VERSION,
        )


def _path_of(key: str) -> tuple[str, ...]:
    """Where stock nests a tensor: ("model", name) or ("optimizer", "state", name, slot)."""
    if slot_key := name_and_slot(key):
        name, slot = slot_key
        return "optimizer", "state", name, slot
    return tuple(key.split(".", 1))
