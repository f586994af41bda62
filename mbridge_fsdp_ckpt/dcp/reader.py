# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Reading stock `fsdp_dtensor`: metadata through a restricted unpickler, tensors through `weights_only`.

Stock has no checksums: a flipped byte in a tensor cannot be seen, a truncated file is.  Other checkpoints of torch's
Distributed Checkpoint open as well, for what looks at them; `DcpSource.kind` tells them apart.

Progress is among the values wherever stock keeps it: Bridge in a file beside the tensors, Megatron-LM in its arguments.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import metadata

from mbridge_fsdp_ckpt.dcp.unpickler import REMEDY, load_arguments, load_record, malformed, read_metadata
from mbridge_fsdp_ckpt.errors import CheckpointError, DamagedCheckpointError, brief
from mbridge_fsdp_ckpt.format.kinds import TORCH_DIST_COMMON, DirectoryKind, kind_by_keys
from mbridge_fsdp_ckpt.format.names import (
    ARGUMENTS,
    DCP_METADATA,
    KEPT_ARGUMENTS,
    MAX_TRAIN_STATE_BYTES,
    OPTIMIZER,
    PARAM_GROUPS,
    PROGRESS,
    TORCH_DIST_METADATA,
    TRAIN_STATE,
)
from mbridge_fsdp_ckpt.format.source import AT_PLACE, Metadata, RankRecord, StoredChunk, slots_in
from mbridge_fsdp_ckpt.io.entries import FileEntry
from mbridge_fsdp_ckpt.io.files import check_file, file_checksum, hold, is_plain_file, read_bounded, size_of
from mbridge_fsdp_ckpt.io.host_bytes import host_bytes
from mbridge_fsdp_ckpt.io.prefetch import Range
from mbridge_fsdp_ckpt.io.ranges import ByteRange, Bytes, OpenFiles, Place, Scratch
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.plan.boxes import Box, whole
from mbridge_fsdp_ckpt.plan.dtypes import dtype_name
from mbridge_fsdp_ckpt.plan.keys import MODEL_PREFIX, STATE_PREFIX, KeyEntry, Kind, name_and_slot
from mbridge_fsdp_ckpt.plan.tiling import tiling_defect

_GROUPS = "optimizer.param_to_group_meta."
_OPERATIONS = "num_floating_point_operations_so_far"
_SECTIONS = "model", OPTIMIZER
_VALUES = ("checkpoint_version", "iteration", _OPERATIONS, "opt_param_scheduler", "lr_scheduler", ARGUMENTS)


_log = logging.getLogger(__name__)


def _coordinates(place: str) -> dict[str, int]:
    """Stock names a place "(pipeline, tensor)"."""
    pipeline, tensor = (int(number) for number in place.strip("()").split(","))
    return {"pipeline": pipeline, "tensor": tensor}


@contextmanager
def _contradictions_named(directory: AnyPath) -> Iterator[None]:
    """What breaks on metadata of the right classes and the wrong content is a damaged manifest."""
    try:
        yield
    except CheckpointError:
        raise
    except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError, MemoryError) as error:
        found = f"{type(error).__name__}: {error}"[:500]
        raise malformed(directory / DCP_METADATA, "metadata that agrees with itself", found) from error


class DcpSource:
    """See `CheckpointSource`.

    Args:
        directory: The checkpoint.
        plain: Whether one that plain DCP wrote of `{"model": ..., "optimizer": ...}`, as torch's `get_state_dict`
            gives them, is read as a model and its optimizer, and all else in it as values.

    Raises:
        ManifestError: `.metadata` is not what stock writes, or names what it must not.
    """

    def __init__(self, directory: AnyPath, *, plain: bool = False) -> None:
        directory, self._plain = hold(directory), plain
        self._files = OpenFiles()
        self._sizes: dict[str, int] = {}
        with _contradictions_named(directory):
            self._open(directory)

    def _open(self, directory: AnyPath) -> None:
        self._directory = directory
        self._metadata = read_metadata(directory / DCP_METADATA)
        identity = f"{directory.name} {file_checksum(directory / DCP_METADATA)}"
        self._storage = {
            (index.fqn, None if index.offset is None else tuple(index.offset)): info
            for index, info in self._metadata.storage_data.items()
        }
        self._bytes = [
            k for k, v in self._metadata.state_dict_metadata.items() if isinstance(v, metadata.BytesStorageMetadata)
        ]
        self._tensors = {
            k: v for k, v in self._metadata.state_dict_metadata.items() if isinstance(v, metadata.TensorStorageMetadata)
        }
        self.tensors: Mapping[str, KeyEntry] = {
            key: KeyEntry(dtype=dtype_name(value.properties.dtype), shape=tuple(value.size), kind=_kind(key, value))
            for key, value in self._tensors.items()
        }
        self.kind = self._kind_of(directory)
        self.is_of_model = self.kind is DirectoryKind.STOCK or (
            self._plain and self.kind is DirectoryKind.DCP and any(key.startswith(MODEL_PREFIX) for key in self.tensors)
        )
        known = (MODEL_PREFIX, STATE_PREFIX) if self.is_of_model else ""
        self._keys = {key: entry for key, entry in self.tensors.items() if key.startswith(known)}
        has_optimizer = any(key.startswith(STATE_PREFIX) for key in self._keys)
        self._slots = tuple(dict.fromkeys(named[1] for key in self._keys if (named := name_and_slot(key))))
        self.metadata = Metadata(
            directory=directory,
            identity=identity,
            format=str(self.kind),
            sections=("model", "optimizer") if has_optimizer else ("model",),
            keys=self._keys,
            values=self._values(),
        )

    def _values(self) -> dict[str, Any]:
        """Non-parameter state that loads need, as far as it is known where it lies."""
        if self.kind is DirectoryKind.TORCH_DIST:
            return self.read_train_state()
        if self.kind is DirectoryKind.STOCK:
            return self.read_values(*_VALUES) | self.read_train_state()
        if not self.is_of_model:
            return {}
        values, unread = self.read_rest(*_SECTIONS)
        if unread:
            text = "values of %s that cannot be read without running code are left out: %s"
            _log.warning(text, self._directory, ", ".join(unread))
        return values

    def _kind_of(self, directory: AnyPath) -> DirectoryKind:
        """Whose it is: Megatron has files beside `torch_dist` checkpoints that tell them, or keys that do."""
        if any(is_plain_file(directory / name) for name in (TORCH_DIST_METADATA, TORCH_DIST_COMMON)):
            return DirectoryKind.TORCH_DIST
        return kind_by_keys(self.entries)

    def hyperparameters(self, names: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """See `CheckpointSource`.  Constructor choices that stock pickled as classes are left out unread."""
        wanted = None if names is None else set(names)
        found: dict[str, dict[str, Any]] = {}
        with _contradictions_named(self._directory):
            for key in (*self._bytes, *(self.tensors.keys() - self._keys.keys())):
                name, _, hyperparameter = key.removeprefix(_GROUPS).rpartition(".")
                if not key.startswith(_GROUPS) or hyperparameter.endswith("_cls"):
                    continue
                if wanted is None or name in wanted:
                    found.setdefault(name, {})[hyperparameter] = self._read_value(key)
            found |= {name: own for name, own in self._by_group.items() if wanted is None or name in wanted}
        return found

    @cached_property
    def _by_group(self) -> dict[str, dict[str, Any]]:
        """Hyperparameters by parameter, of param groups as torch's `get_state_dict` gives them."""
        groups: dict[Any, Any] = {}
        for key, path in self.entries.items():
            if self._plain and path[:2] == (OPTIMIZER, PARAM_GROUPS) and len(path) > 3:
                _set(groups, path[2:], self._read_value(key))
        found: dict[str, dict[str, Any]] = {}
        for group in groups.values():
            own = {name: value for name, value in group.items() if name != "params"}
            found.update((str(name), own) for name in group.get("params", ()))
        return found

    def look_near(self, ranks: Iterable[int]) -> None:
        """See `CheckpointSource`: all is known of all ranks."""

    def chunks(
        self, keys: Iterable[str], needed: Mapping[str, Sequence[Box]] | None = None
    ) -> dict[str, list[StoredChunk]]:
        """See `CheckpointSource`."""
        with _contradictions_named(self._directory):
            return {key: [self._stored(key, chunk) for chunk in self._tensors[key].chunks] for key in keys}

    def read(self, chunk: StoredChunk, *, verify: bool = True, scratch: Scratch | None = None) -> torch.Tensor:
        """See `CheckpointSource`; there is nothing to verify bytes against."""
        tensor = self._load(chunk, self._files.read(chunk.path, *chunk.record, scratch=scratch))
        entry = self._tensors[chunk.key]
        if (
            not isinstance(tensor, torch.Tensor)
            or tuple(tensor.shape) != chunk.box.size
            or tensor.dtype != entry.properties.dtype
        ):
            raise DamagedCheckpointError(
                expected=f"{entry.properties.dtype} of shape {chunk.box.size} for {chunk.key}",
                found=f"{getattr(tensor, 'dtype', type(tensor).__name__)} {tuple(getattr(tensor, 'shape', ()))}",
                remedy=REMEDY,
                key=str(chunk.path),
            )
        return tensor

    def read_rows(
        self, chunk: StoredChunk, scratch: Scratch, *, verify: bool = True
    ) -> Iterator[tuple[Box, torch.Tensor]]:
        """See `CheckpointSource`: all rows at a time."""
        yield chunk.box, self.read(chunk, verify=verify, scratch=scratch)

    def read_part(self, chunk: StoredChunk, place: Place, scratch: Scratch, *, verify: bool = True) -> None:
        """See `CheckpointSource`: where the elements lie, only torch knows."""
        elements = host_bytes(self.read(chunk, verify=verify, scratch=scratch))
        place.memory[:] = elements[place.start : place.start + place.memory.size]

    def reading_ahead(self, chunks: Iterable[StoredChunk]) -> AbstractContextManager[None]:
        """See `CheckpointSource`."""
        return self._files.reading_ahead(Range(chunk.path, *chunk.record) for chunk in chunks)

    def verify(self, chunk: StoredChunk, scratch: Scratch) -> None:
        """See `CheckpointSource`: whether torch can read it."""
        self.read(chunk, scratch=scratch)

    def ranks(self) -> Iterator[RankRecord]:
        """One record a (pipeline, tensor) place whose RNG state was saved."""
        yield from self._records

    def slots(self, name: str) -> dict[str, KeyEntry]:
        """See `CheckpointSource`."""
        return slots_in(self._keys.get, name, self._slots)

    def stateless(self, names: Iterable[str]) -> set[str]:
        """See `CheckpointSource`: stock does not say; param groups of a torch optimizer list all that it updates."""
        return {name for name in names if name in self._by_group and not self.slots(name)}

    def share(self, index: int, count: int) -> list[str]:
        """See `CheckpointSource`."""
        return sorted(self._keys)[index::count]

    def near(self, place: Mapping[str, int]) -> tuple[RankRecord | None, RankRecord | None]:
        """See `CheckpointSource`: stock keeps one of each (pipeline, tensor) place."""
        at = (r for r in self._records if all(r.coordinates.get(axis) == place.get(axis) for axis in AT_PLACE))
        return None, next(at, None)

    def states(self, modules: Iterable[str]) -> Iterator[RankRecord]:
        """See `CheckpointSource`: stock's is in its pickles."""
        yield from ()

    @cached_property
    def _records(self) -> tuple[RankRecord, ...]:
        with _contradictions_named(self._directory):
            places = dict(self.read_values("rng_state").get("rng_state", {}))
            return tuple(RankRecord(_coordinates(place), {"rng_state": {place: one}}) for place, one in places.items())

    def _stored(self, key: str, chunk: Any) -> StoredChunk:
        return self._place(key, Box(tuple(chunk.offsets), tuple(chunk.sizes)), (key, tuple(chunk.offsets)))

    def _place(self, key: str, box: Box, index: Any) -> StoredChunk:
        info = self._storage.get(index)
        if info is None or not box.inside(self.tensors[key].shape if key in self.tensors else box.end):
            raise malformed(self._directory, f"a place in the directory for {key} {box}", f"{info}")
        offset, length, name = info.offset, info.length, info.relative_path
        if getattr(info, "transform_descriptors", None) or not all(type(n) is int and n >= 0 for n in (offset, length)):
            raise malformed(self._directory, f"plain bytes for {key}", f"{info}")
        path = self._file(name)
        if offset + length > self._sizes[name]:
            raise DamagedCheckpointError(
                expected=f"{offset + length} bytes or more", found=f"{self._sizes[name]}", remedy=REMEDY, key=str(path)
            )
        return StoredChunk(key, box, path, ByteRange(offset, length))

    def _file(self, name: Any) -> AnyPath:
        if not isinstance(name, str):
            raise malformed(self._directory, "file names inside the directory", repr(name)[:200])
        if name not in self._sizes:
            try:
                FileEntry(name=name, size=0, checksum="")
            except ValueError as error:
                raise malformed(self._directory, "file names inside the directory", repr(name)[:200]) from error
            path = self._directory / name
            size = size_of(path) if is_plain_file(path) else 0
            check_file(self._directory, FileEntry(name=name, size=size, checksum=""))
            self._sizes[name] = size
        return self._directory / name

    def read_object(self, key: str) -> Any:
        """A value that is no tensor, through the `weights_only` loader.

        Raises:
            DamagedCheckpointError: It is no data, or not there.
            ManifestError: The metadata does not know it.
        """
        return self._load(*self._read_object(key))

    def _object(self, key: str) -> StoredChunk:
        """Where a value lies that is no tensor."""
        return self._place(key, Box((), ()), (key, None))

    def _read_object(self, key: str) -> tuple[StoredChunk, Bytes]:
        chunk = self._object(key)
        return chunk, self._files.read(chunk.path, *chunk.record)

    def _read_arguments(self) -> dict[str, Any]:
        """Of Megatron-LM's arguments, which are one pickle, those that are kept."""
        found = self._load(*self._read_object(ARGUMENTS), load_arguments)
        return {name: found[name] for name in KEPT_ARGUMENTS if name in found}

    def read_train_state(self) -> dict[str, Any]:
        """Bridge's progress, which stock keeps in a file of its own.

        Raises:
            DamagedCheckpointError: It cannot be read.
        """
        path = self._directory / TRAIN_STATE
        if not is_plain_file(path):
            return {}
        data = read_bounded(path, MAX_TRAIN_STATE_BYTES)
        try:
            return {PROGRESS: load_record(np.frombuffer(data, dtype=np.uint8))}
        except Exception as error:  # a pickle stream can raise anything
            raise DamagedCheckpointError(
                expected="the train state as Bridge saves it", found=brief(error), remedy=REMEDY, key=str(path)
            ) from error

    def _load(self, chunk: StoredChunk, data: Bytes, load: Callable[[Bytes], Any] = load_record) -> Any:
        try:
            return load(data)
        except Exception as error:  # a pickle stream can raise anything
            raise DamagedCheckpointError(
                expected=f"data for {chunk.key}",
                found=brief(error),
                remedy=REMEDY,
                key=str(chunk.path),
            ) from error

    @property
    def entries(self) -> dict[str, tuple[Any, ...]]:
        """Every tensor and value, with its path in the state dict that stock saved; empty where that is not known."""
        paths = self._metadata.planner_data or {}
        return {key: tuple(paths.get(key, ())) for key in (*self._tensors, *self._bytes)}

    def read_values(self, *roots: str) -> dict[str, Any]:
        """Non-parameter state below the given roots, nested again as `planner_data` says.

        Raises:
            DamagedCheckpointError: It is no data, or not there.
            ManifestError: The metadata contradicts itself.
        """
        nested: dict[str, Any] = {}
        for key in (*self._bytes, *self._tensors):
            path = (self._metadata.planner_data or {}).get(key, ())
            if not path or path[0] not in roots:
                continue
            is_arguments = key == ARGUMENTS and key in self._bytes
            _set(nested, path, self._read_arguments() if is_arguments else self._read_value(key))
        return nested

    def read_rest(self, *left_out: str) -> tuple[dict[str, Any], list[str]]:
        """All that is no key of the metadata, no hyperparameter and not below the given roots.

        Returns:
            It, nested again, and the names of what cannot be read without running code.

        Raises:
            DamagedCheckpointError: A file is missing, or too short.
            ManifestError: The metadata contradicts itself.
        """
        nested: dict[str, Any] = {}
        unread = []
        with _contradictions_named(self._directory):
            for key, path in self.entries.items():
                place = path or (key,)
                if key in self._keys or (key.startswith(_GROUPS) and not key.endswith("_cls")):
                    continue
                if re.split(r"[./]", key)[0] in left_out:
                    continue
                if key in self._tensors:
                    _set(nested, place, self._read_value(key))
                    continue
                _, data = self._read_object(key)
                try:
                    value = load_record(data)
                except Exception:  # a pickle stream can raise anything
                    unread.append(key)
                else:
                    _set(nested, place, value)
        return nested, unread

    def look_at(self, key: str) -> list[StoredChunk]:
        """Where a tensor or a value lies, of those that are no keys of the metadata, too.

        Raises:
            DamagedCheckpointError: A file is missing, or too short.
            ManifestError: The metadata contradicts itself.
        """
        with _contradictions_named(self._directory):
            return self.chunks([key])[key] if key in self._tensors else [self._object(key)]

    def _read_value(self, key: str) -> Any:
        """A value, which stock saves as a tensor where it is one."""
        if key not in self._tensors:
            return self.read_object(key)
        box = whole(self.tensors[key].shape)
        chunks = self.chunks([key])[key]
        defect = tiling_defect(box, (chunk.box for chunk in chunks))
        if defect:
            raise malformed(self._directory, f"chunks that cover {key} once", defect)
        read = [self.read(chunk) for chunk in chunks]  # before there is memory for what the metadata claims
        value = torch.empty(box.size, dtype=self._tensors[key].properties.dtype)
        for chunk, part in zip(chunks, read, strict=True):
            value[chunk.box.slices_in(box)] = part
        return value


def _kind(key: str, value: Any) -> Kind:
    return "sharded" if tuple(value.size) or key.startswith(MODEL_PREFIX) else "tensor"


def _set(nested: Any, path: tuple[Any, ...], value: Any) -> None:
    for here, following in pairwise(path):
        empty: Any = [] if isinstance(following, int) else {}
        nested = _item(nested, here, empty)
    _item(nested, path[-1], value, replace=True)


def _item(container: Any, key: Any, value: Any, *, replace: bool = False) -> Any:
    if isinstance(container, list):
        container.extend([None] * (key + 1 - len(container)))
        if replace or container[key] is None:
            container[key] = value
        return container[key]
    if replace:
        container[key] = value
    return container.setdefault(key, value)
