# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Unpickling what stock wrote: torch's metadata classes and NumPy arrays, and nothing else.

`.metadata` and byte objects of stock `fsdp_dtensor` are pickles, which can run code.  The metadata goes through
`_MetadataUnpickler`, Megatron-LM's arguments through `_ArgumentsUnpickler`, everything else through torch's own
`weights_only` loader.  For `torch_dist` that is given `Foreign` for every class that it does not know.
"""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import pickletools
import sys
import types
import zipfile
from _compat_pickle import IMPORT_MAPPING
from collections.abc import Iterator
from enum import Enum
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, metadata

from mbridge_fsdp_ckpt.errors import ManifestError
from mbridge_fsdp_ckpt.format.names import DCP_METADATA
from mbridge_fsdp_ckpt.io.files import is_plain_file, opened, size_of
from mbridge_fsdp_ckpt.io.ranges import Bytes
from mbridge_fsdp_ckpt.io.store import AnyPath

_MAX_METADATA_BYTES = 1 << 32
_MEMO_WRITES = {"PUT", "BINPUT", "LONG_BINPUT"}
REMEDY = "The checkpoint is damaged, or was not written by stock fsdp_dtensor."

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


class _Unread:
    """Stands for what nobody reads, such as a writer's plans; made from anything, it holds nothing."""

    def __new__(cls, *arguments: Any, **named: Any) -> _Unread:
        return super().__new__(cls)

    def __init__(self, *arguments: Any, **named: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None: ...

    def add(self, item: Any) -> None: ...


_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_ALLOWED[(_MEGATRON, "MCoreMetadata")] = metadata.Metadata  # of torch_dist checkpoints, as older releases wrote them
_ALLOWED |= {
    (module, name): _Unread
    for module, names in {
        "torch.distributed.checkpoint.planner": (
            "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData",
        ),
        _MEGATRON: ("MCoreSavePlan",),
    }.items()
    for name in names
}  # fmt: skip


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


def _check_claims(data: bytes) -> None:
    """Refuse a pickle that claims more than it has: the unpickler allocates what the pickle claims before it reads.

    `genops` refuses a string that is longer than the rest.  The memo is an array as long as its highest place, which
    a pickler takes one by one, each with an instruction of its own (`save` and `memoize` in CPython's pickle.py).

    Raises:
        ValueError: It does.
    """
    places = (int(place or 0) for opcode, place, _ in pickletools.genops(data) if opcode.name in _MEMO_WRITES)
    for counted, place in enumerate(places):
        if not 0 <= place <= counted:
            raise ValueError(f"place {place} of the memo follows {counted} others: a pickler counts them up")


def _own_copy(allowed: Any) -> Any:
    if isinstance(allowed, torch.dtype) or allowed in (torch.Size, collections.OrderedDict):
        return allowed  # nothing can be set on these
    if isinstance(allowed, type) and not issubclass(allowed, Enum):
        return type(allowed.__name__, (allowed,), {})
    return lambda *arguments: allowed(*arguments)


_MULTIARRAY: Any = import_module("numpy._core.multiarray")
_NUMPY: list[Any] = [
    (np.ndarray, "numpy.ndarray"),
    (np.dtype, "numpy.dtype"),
    (_MULTIARRAY._reconstruct, "numpy._core.multiarray._reconstruct"),
    (_MULTIARRAY._reconstruct, "numpy.core.multiarray._reconstruct"),
    (_MULTIARRAY.scalar, "numpy._core.multiarray.scalar"),
    *(type(np.dtype(code)) for code in ("uint32", "int64", "float32", "float64", "bool")),
]


def read_metadata(path: AnyPath) -> Any:
    """The `Metadata` in a file.

    Raises:
        ManifestError: It is something else, or names anything that is not metadata.
        OSError: The storage refused to tell.
    """
    if not is_plain_file(path) or size_of(path) > _MAX_METADATA_BYTES:
        raise malformed(path, f"a plain file of at most {_MAX_METADATA_BYTES} bytes", "another")
    with opened(path) as file:  # that the storage does not answer says nothing of the file
        data = file.read(size_of(path))
    try:
        _check_claims(data)
        found = _MetadataUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # a pickle stream can raise anything
        raise malformed(path, "DCP metadata", f"{type(error).__name__}: {error}"[:500]) from error
    if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
        raise malformed(path, "DCP metadata", type(found).__name__)
    wrong = next(_wrong_fields(found), None)
    if wrong is not None:
        raise malformed(path, "DCP metadata whose fields have their types", wrong)
    return found


def files_named(directory: AnyPath) -> set[str]:
    """The files of tensors and values that a directory's `.metadata` names.

    Raises:
        ManifestError: The file is something else, or names anything that is not metadata.
    """
    return {info.relative_path for info in read_metadata(directory / DCP_METADATA).storage_data.values()}


def _wrong_fields(found: Any) -> Iterator[str]:
    """Fields of another type than stock writes.  Their values stay unprinted: a pickle can nest them without end."""
    for key, value in found.state_dict_metadata.items():
        if not isinstance(key, str):
            yield f"a key of type {type(key).__name__}"
        if isinstance(value, metadata.TensorStorageMetadata):
            sizes = [value.size, *(size for chunk in value.chunks for size in (chunk.offsets, chunk.sizes))]
            if not all(map(_is_size, sizes)) or not isinstance(value.properties.dtype, torch.dtype):
                yield f"{key[:200]}: sizes, offsets or dtype"
        elif not isinstance(value, metadata.BytesStorageMetadata):
            yield f"{key[:200]}: {type(value).__name__}"
    for index, info in found.storage_data.items():
        place = info.relative_path, info.offset, info.length
        if not isinstance(index.fqn, str) or not (index.offset is None or _is_size(index.offset)):
            yield "the index of a chunk"
        elif tuple(map(type, place)) != (str, int, int):
            yield f"{index.fqn[:200]}: the place of its bytes"
    for key, path in (found.planner_data or {}).items():
        if not isinstance(key, str) or not all(type(part) in (str, int) for part in path):
            yield "the path of a key"


def _is_size(size: Any) -> bool:
    return isinstance(size, tuple) and all(type(number) is int and number >= 0 for number in size)


class _Namespace:
    """Stands for Megatron-LM's arguments."""


_NAMESPACES = {("argparse", "Namespace"), ("types", "SimpleNamespace")}


class _ArgumentsUnpickler(pickle.Unpickler):
    """Makes namespaces and plain data; of every other class or function it makes `_Unread`, and calls nothing else."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        kind = _Namespace if (module_name, global_name) in _NAMESPACES else _Unread
        return type(kind.__name__, (kind,), {})

    def persistent_load(self, identity: Any) -> Any:
        return _Unread()


def load_arguments(data: Bytes) -> dict[str, bool | int | float | str | None]:
    """Megatron-LM's arguments as `torch.save` wrote them: those that are numbers and text.  It can raise anything.

    Where it is no namespace, it is something of somebody else's that has the name, and says nothing here.
    """
    with _record(data) as record:
        (name,) = [name for name in record.namelist() if name.endswith("/data.pkl")]
        pickled = record.read(name)
    _check_claims(pickled)
    found = _ArgumentsUnpickler(io.BytesIO(pickled)).load()
    if not isinstance(found, _Namespace):
        return {}
    plain = (bool, int, float, str, type(None))
    return {name: value for name, value in vars(found).items() if type(name) is str and type(value) in plain}


def load_record(data: Bytes) -> Any:
    """A tensor or a value that `torch.save` wrote, through the `weights_only` loader.  It can raise anything."""
    _record(data).close()
    with torch.serialization.safe_globals(_NUMPY):
        return torch.load(io.BytesIO(memoryview(data)), map_location="cpu", weights_only=True)


_OF_DATA = {"argparse", "collections", "datetime", "decimal", "enum", "pathlib", "signal", "types", "uuid"}
"""Modules of Python's library whose classes Megatron-LM's arguments may hold; others run code, or could."""
_MAX_FOREIGN = 1000


class Foreign:
    """Stands for an object of a class that is not known here, which is never imported: what it was made from."""

    path = ""
    content: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> Foreign:
        """Made as a pickle says: called, or without."""
        made = super().__new__(cls)
        made.content = arguments
        return made

    def __init__(self, *arguments: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.content = (*self.content, state)

    def __eq__(self, other: object) -> bool:
        """Whether both are of one class, and of the same numbers and text, as members of enumerations are."""
        if not isinstance(other, Foreign) or self.path != other.path or not self._is_plain():
            return self is other
        return self.content == other.content and [*map(type, self.content)] == [*map(type, other.content)]

    def __hash__(self) -> int:
        return hash(self.path)

    def __repr__(self) -> str:
        return f"{self.path}{self.content if self._is_plain() else '(...)'}"[:200]

    def _is_plain(self) -> bool:
        return all(type(item) in (bool, int, str) for item in self.content)


@cache
def _foreign(path: str) -> type[Foreign]:
    return type("Foreign", (Foreign,), {"path": path})


def load_state(data: Bytes) -> dict[str, Any]:
    """Non-tensor state as Megatron-LM saves it in `torch_dist`, namespaces as mappings.  It can raise anything.

    Whatever it names that torch's `weights_only` loader does not know becomes `Foreign`; what it names of Python's own
    library, where the functions are that run code, is refused.
    """
    with _record(data) as record:
        broken = record.testzip()
    if broken:
        raise ValueError(f"{broken} is not as it was written (CRC-32)")
    file = io.BytesIO(memoryview(data))
    with torch.serialization.safe_globals(_NUMPY):
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        for path in sorted(unknown):
            module = IMPORT_MAPPING.get(path.partition(".")[0], path).partition(".")[0]  # as Python 2 called it
            if len(unknown) > _MAX_FOREIGN or (module in sys.stdlib_module_names and module not in _OF_DATA):
                raise pickle.UnpicklingError(f"{path} is no data")
        foreign: list[Any] = [(_foreign(path), path) for path in unknown]
        file.seek(0)
        with torch.serialization.safe_globals(foreign):
            found = torch.load(file, map_location="cpu", weights_only=True)
    state = found[0] if isinstance(found, list) and found else found
    if not isinstance(state, dict):
        raise TypeError(f"a {type(state).__name__}, no mapping")
    return {str(name): _without_namespace(value) for name, value in state.items()}


def _without_namespace(value: Any) -> Any:
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):  # Megatron lets torch make them
        return dict(vars(value))
    if isinstance(value, Foreign) and value.path in {".".join(name) for name in _NAMESPACES}:
        return next((state for state in value.content if isinstance(state, dict)), {})
    return value


def _record(data: Bytes) -> zipfile.ZipFile:
    record = zipfile.ZipFile(io.BytesIO(memoryview(data)))
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in record.infolist()):
        raise ValueError("a compressed record: torch.save writes none, and it could be larger than memory")
    return record


def malformed(path: AnyPath, expected: str, found: str) -> ManifestError:
    """The error for a checkpoint that stock did not write like this."""
    return ManifestError(expected=expected, found=found, remedy=REMEDY, key=str(path))
