"""Reading stock `fsdp_dtensor`: an unpickler that knows Torch Distributed Checkpoint's metadata classes and no more.

Stock's `.metadata` and byte objects are pickles, which can run code; its tensors are `torch.save` records.  Here the
metadata goes through `_MetadataUnpickler`, everything else through torch's own `weights_only` loader.
Stock has no checksums: a flipped byte in a tensor cannot be seen, a truncated file is.
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, metadata

from mbridge_fsdp_ckpt.errors import CheckpointError, DamagedCheckpointError, ManifestError
from mbridge_fsdp_ckpt.geometry import Box
from mbridge_fsdp_ckpt.storage.checksums import file_checksum
from mbridge_fsdp_ckpt.storage.manifest import FileEntry, KeyEntry, check_file
from mbridge_fsdp_ckpt.storage.reader import read_bytes
from mbridge_fsdp_ckpt.storage.source import DCP_METADATA, RankRecord, StoredChunk
from mbridge_fsdp_ckpt.storage.values import dtype_name

_MAX_METADATA_BYTES = 1 << 32
_GROUPS, _STATE = "optimizer.param_to_group_meta.", "optimizer.state."
_REMEDY = "The checkpoint is damaged, or was not written by stock fsdp_dtensor."

_ALLOWED: dict[tuple[str, str], Any] = {
    (cls.__module__, cls.__qualname__): cls
    for cls in (
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        torch.Size,
        collections.OrderedDict,
    )
}
_ALLOWED |= {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_ALLOWED[("torch.serialization", "_get_layout")] = torch.serialization._get_layout


def _path_as_text(*parts: str) -> str:
    return "/".join(parts)


for _module in ("pathlib", "pathlib._local"):
    for _name in ("PosixPath", "PurePosixPath", "Path"):
        _ALLOWED[(_module, _name)] = _path_as_text  # StorageMeta.checkpoint_id, which nobody reads


class _MetadataUnpickler(pickle.Unpickler):
    """Gives a pickle its own copies of the classes: its instructions may set attributes of what they are given."""

    def __init__(self, data: io.BytesIO) -> None:
        super().__init__(data)
        self._own: dict[tuple[str, str], Any] = {}

    def find_class(self, module_name: str, global_name: str) -> Any:
        name = module_name, global_name
        if name not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module_name}.{global_name} is not DCP metadata")
        if name not in self._own:
            self._own[name] = _own_copy(_ALLOWED[name])
        return self._own[name]


def _own_copy(allowed: Any) -> Any:
    if isinstance(allowed, torch.dtype) or allowed in (torch.Size, collections.OrderedDict):
        return allowed  # nothing can be set on these
    if isinstance(allowed, type) and not issubclass(allowed, Enum):
        return type(allowed.__name__, (allowed,), {})
    return lambda *arguments: allowed(*arguments)


@contextmanager
def _contradictions_named(directory: Path) -> Iterator[None]:
    """What breaks on metadata of the right classes and the wrong content is a damaged manifest."""
    try:
        yield
    except CheckpointError:
        raise
    except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError, MemoryError) as error:
        found = f"{type(error).__name__}: {error}"[:500]
        raise _malformed(directory / DCP_METADATA, "metadata that agrees with itself", found) from error


class DcpSource:
    """See `CheckpointSource`.

    Raises:
        ManifestError: `.metadata` is not what stock writes, or names what it must not.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with _contradictions_named(directory):
            self._open(directory)

    def _open(self, directory: Path) -> None:
        self._metadata = _read_metadata(directory / DCP_METADATA)
        self.identity = f"{directory.name} {file_checksum(directory / DCP_METADATA)}"
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
        self.keys: Mapping[str, KeyEntry] = {
            key: KeyEntry(dtype=dtype_name(value.properties.dtype), shape=tuple(value.size), kind=_kind(key, value))
            for key, value in self._tensors.items()
            if key.startswith(("model.", _STATE))
        }
        has_optimizer = any(key.startswith(_STATE) for key in self.keys)
        self.sections: tuple[str, ...] = ("model", "optimizer") if has_optimizer else ("model",)
        self.topology: Mapping[str, int | str] = {}
        self.stateless: frozenset[str] = frozenset()
        self._sizes: dict[str, int] = {}
        self.values: Mapping[str, Any] = self._read_values("checkpoint_version", "iteration", "opt_param_scheduler")

    def hyperparameters(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """See `CheckpointSource`.  Constructor choices that stock pickled as classes are left out unread."""
        wanted = set(names)
        found: dict[str, dict[str, Any]] = {}
        with _contradictions_named(self.directory):
            for key in self._bytes:
                name, _, hyperparameter = key.removeprefix(_GROUPS).rpartition(".")
                if key.startswith(_GROUPS) and name in wanted and not hyperparameter.endswith("_cls"):
                    found.setdefault(name, {})[hyperparameter] = self._read_object(key)
        return found

    def chunks(self, keys: Iterable[str]) -> dict[str, list[StoredChunk]]:
        """See `CheckpointSource`."""
        with _contradictions_named(self.directory):
            return {key: [self._stored(key, chunk) for chunk in self._tensors[key].chunks] for key in keys}

    def read(self, chunk: StoredChunk) -> torch.Tensor:
        """See `CheckpointSource`."""
        tensor = self._load(chunk, read_bytes(chunk))
        entry = self._tensors[chunk.key]
        if (
            not isinstance(tensor, torch.Tensor)
            or tuple(tensor.shape) != chunk.box.size
            or tensor.dtype != entry.properties.dtype
        ):
            raise DamagedCheckpointError(
                expected=f"{entry.properties.dtype} of shape {chunk.box.size} for {chunk.key}",
                found=f"{getattr(tensor, 'dtype', type(tensor).__name__)} {tuple(getattr(tensor, 'shape', ()))}",
                remedy=_REMEDY,
                key=str(chunk.path),
            )
        return tensor

    def ranks(self) -> Iterator[RankRecord]:
        """One record a (pipeline, tensor) place whose RNG state was saved."""
        with _contradictions_named(self.directory):
            places = dict(self._read_values("rng_state").get("rng_state", {}))
        for place, states in places.items():
            pipeline, tensor = (int(number) for number in place.strip("()").split(","))
            yield RankRecord({"pipeline": pipeline, "tensor": tensor}, {"rng_state": {place: states}})

    def _stored(self, key: str, chunk: Any) -> StoredChunk:
        return self._place(key, Box(tuple(chunk.offsets), tuple(chunk.sizes)), (key, tuple(chunk.offsets)))

    def _place(self, key: str, box: Box, index: Any) -> StoredChunk:
        info = self._storage.get(index)
        if info is None or not box.inside(self.keys[key].shape if key in self.keys else box.end):
            raise _malformed(self.directory, f"a place in the directory for {key} {box}", f"{info}")
        offset, length, name = info.offset, info.length, info.relative_path
        if getattr(info, "transform_descriptors", None) or not all(type(n) is int and n >= 0 for n in (offset, length)):
            raise _malformed(self.directory, f"plain bytes for {key}", f"{info}")
        path = self._file(name)
        if offset + length > self._sizes[name]:
            raise DamagedCheckpointError(
                expected=f"{offset + length} bytes or more", found=f"{self._sizes[name]}", remedy=_REMEDY, key=str(path)
            )
        return StoredChunk(key, box, path, offset, length, "")

    def _file(self, name: Any) -> Path:
        if not isinstance(name, str):
            raise _malformed(self.directory, "file names inside the directory", repr(name)[:200])
        if name not in self._sizes:
            try:
                FileEntry(name=name, size=0, checksum="")
            except ValueError as error:
                raise _malformed(self.directory, "file names inside the directory", repr(name)[:200]) from error
            path = self.directory / name
            size = path.stat().st_size if path.is_file() and not path.is_symlink() else 0
            check_file(self.directory, FileEntry(name=name, size=size, checksum=""))
            self._sizes[name] = size
        return self.directory / name

    def _read_object(self, key: str) -> Any:
        chunk = self._place(key, Box((), ()), (key, None))
        return self._load(chunk, read_bytes(chunk))

    def _load(self, chunk: StoredChunk, data: bytearray) -> Any:
        try:
            with torch.serialization.safe_globals(_NUMPY):
                return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # a pickle stream can raise anything
            raise DamagedCheckpointError(
                expected=f"data for {chunk.key}",
                found=f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}",
                remedy=_REMEDY,
                key=str(chunk.path),
            ) from error

    def _read_values(self, *roots: str) -> dict[str, Any]:
        """Non-parameter state below the given roots, nested again as `planner_data` says."""
        nested: dict[str, Any] = {}
        for key in (*self._bytes, *self._tensors):
            path = (self._metadata.planner_data or {}).get(key, ())
            if not path or path[0] not in roots:
                continue
            value = self._read_object(key) if key not in self._tensors else self._read_tensor(key)
            _set(nested, path, value)
        return nested

    def _read_tensor(self, key: str) -> torch.Tensor:
        chunk = self._tensors[key].chunks[0]
        return self.read(self._stored(key, chunk))


_MULTIARRAY: Any = import_module("numpy._core.multiarray")
_NUMPY: list[Any] = [
    (np.ndarray, "numpy.ndarray"),
    (np.dtype, "numpy.dtype"),
    (_MULTIARRAY._reconstruct, "numpy._core.multiarray._reconstruct"),
    (_MULTIARRAY._reconstruct, "numpy.core.multiarray._reconstruct"),
    (_MULTIARRAY.scalar, "numpy._core.multiarray.scalar"),
    *(type(np.dtype(code)) for code in ("uint32", "int64", "float32", "float64", "bool")),
]


def _read_metadata(path: Path) -> Any:
    size = path.stat().st_size
    if size > _MAX_METADATA_BYTES or path.is_symlink():
        raise _malformed(path, f"a plain file of at most {_MAX_METADATA_BYTES} bytes", f"{size} bytes")
    try:
        found = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
    except Exception as error:  # a pickle stream can raise anything
        raise _malformed(path, "DCP metadata", f"{type(error).__name__}: {error}"[:500]) from error
    if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
        raise _malformed(path, "DCP metadata", type(found).__name__)
    return found


def _kind(key: str, value: Any) -> Literal["sharded", "tensor"]:
    return "sharded" if tuple(value.size) or key.startswith("model.") else "tensor"


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


def _malformed(path: Path, expected: str, found: str) -> ManifestError:
    return ManifestError(expected=expected, found=found, remedy=_REMEDY, key=str(path))
