"""Reading this format: by the manifest alone, no unpickling, every bound checked before the first payload byte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch

from mbridge_fsdp_ckpt.errors import DamagedCheckpointError
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name
from mbridge_fsdp_ckpt.storage.checksums import Hasher
from mbridge_fsdp_ckpt.storage.files import check_content, check_file, hold, malformed
from mbridge_fsdp_ckpt.storage.format.manifest import read_manifest
from mbridge_fsdp_ckpt.storage.format.names import FORMAT_NAME, MANIFEST_NAME
from mbridge_fsdp_ckpt.storage.format.schema import TableHeader
from mbridge_fsdp_ckpt.storage.format.table import Scalar, read_table, read_table_header
from mbridge_fsdp_ckpt.storage.format.values import decode
from mbridge_fsdp_ckpt.storage.ranges import Bytes, OpenFiles, Scratch
from mbridge_fsdp_ckpt.storage.source import Head, RankRecord, StoredChunk
from mbridge_fsdp_ckpt.storage.store import AnyPath


class SafeSource:
    """See `CheckpointSource`.

    Raises:
        NotACheckpointError, ManifestError, UnsupportedVersionError, DamagedCheckpointError: On opening.
    """

    def __init__(self, directory: AnyPath) -> None:
        directory = hold(directory)
        self._files = OpenFiles()
        self.manifest = manifest = read_manifest(directory)
        self.head = Head(
            directory=directory,
            identity=f"{directory.name} {manifest.checksum}",
            format=FORMAT_NAME,
            sections=manifest.sections,
            keys=manifest.keys,
            values=decode(manifest.values),
            topology=manifest.topology,
            files=manifest.files,
            tables_size=sum(entry.size for entry in manifest.tables),
        )
        self._tables = [check_content(directory, entry, listed_in=MANIFEST_NAME) for entry in manifest.tables]

    @cached_property
    def headers(self) -> list[TableHeader]:
        """What each saving rank says of itself, in the order of the manifest's tables."""
        headers = [read_table_header(path) for path in self._tables]
        for path, entry, header in zip(self._tables, self.manifest.tables, headers, strict=True):
            if header.rank != entry.rank:
                raise malformed(path, f"the table of rank {entry.rank}, as {MANIFEST_NAME} has it", f"{header.rank}")
        return headers

    def hyperparameters(self, names: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """See `CheckpointSource`."""
        wanted = None if names is None else set(names)
        found: dict[str, dict[str, Any]] = {}
        for header in self.headers:
            for group in header.parameter_groups:
                members = set(group.parameters) if wanted is None else wanted.intersection(group.parameters)
                members -= found.keys()
                if members:
                    found.update(dict.fromkeys(members, decode(group.hyperparameters)))
        return found

    def chunks(self, keys: Iterable[str]) -> dict[str, list[StoredChunk]]:
        """See `CheckpointSource`."""
        found: dict[str, list[StoredChunk]] = {key: [] for key in keys}
        for path, header in zip(self._tables, self.headers, strict=True):
            files: dict[int, AnyPath] = {}
            for chunk in read_table(path, self.head.keys):
                if chunk.key not in found:
                    continue
                if isinstance(chunk, Scalar):
                    found[chunk.key].append(StoredChunk(chunk.key, chunk.box, path, data=chunk.data))
                    continue
                if chunk.file not in files:
                    files[chunk.file] = check_file(self.head.directory, header.files[chunk.file], path.name)
                elements_at = chunk.elements.offset - chunk.record.offset
                place = files[chunk.file], chunk.record
                stored = StoredChunk(chunk.key, chunk.box, *place, chunk.checksum, elements_at)
                found[chunk.key].append(stored)
        return found

    def read(self, chunk: StoredChunk, *, verify: bool = True, scratch: Scratch | None = None) -> torch.Tensor:
        """See `CheckpointSource`."""
        dtype = dtype_from_name(self.head.keys[chunk.key].dtype)
        if chunk.data:
            return elements(np.frombuffer(bytearray(chunk.data), dtype=np.uint8), dtype, chunk.box)
        hasher = Hasher() if verify else None
        record = self._files.read(chunk.path, *chunk.record, hasher, scratch)
        if hasher is not None:
            _check_record(chunk, hasher.result())
        begin, size = chunk.elements_at, chunk.box.volume * dtype.itemsize
        return elements(record[begin : begin + size], dtype, chunk.box)

    def verify(self, chunk: StoredChunk, scratch: Scratch) -> None:
        """See `CheckpointSource`; a table was verified when it was opened."""
        if not chunk.data:
            _check_record(chunk, self._files.checksum(chunk.path, *chunk.record, scratch))

    def ranks(self) -> Iterator[RankRecord]:
        """See `CheckpointSource`."""
        yield from self._records

    @cached_property
    def _records(self) -> tuple[RankRecord, ...]:
        return tuple(
            RankRecord(header.coordinates, decode(header.values), decode(header.extra_state), header.stateless)
            for header in self.headers
        )


def _check_record(chunk: StoredChunk, found: str) -> None:
    if found != chunk.checksum:
        raise DamagedCheckpointError(
            expected=f"{chunk.checksum} of {chunk.key} {chunk.box}",
            found=f"{found} in bytes [{chunk.record.offset}, {chunk.record.end})",
            remedy="The file was changed after it was written: use another checkpoint.",
            key=str(chunk.path),
        )


def elements(data: Bytes, dtype: torch.dtype, box: Box) -> torch.Tensor:
    """Raw bytes as a tensor shaped like a box."""
    if not data.size:
        return torch.empty(box.size, dtype=dtype)
    aligned = data if data.ctypes.data % dtype.itemsize == 0 else data.copy()
    return torch.from_numpy(aligned).view(dtype).reshape(box.size)
