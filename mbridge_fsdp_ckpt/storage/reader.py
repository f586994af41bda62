"""Reading this format: by the manifest alone, no unpickling, every bound checked before the first payload byte."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mbridge_fsdp_ckpt.errors import DamagedCheckpointError
from mbridge_fsdp_ckpt.geometry import Box
from mbridge_fsdp_ckpt.storage.checksums import checksum, file_checksum
from mbridge_fsdp_ckpt.storage.manifest import (
    KeyEntry,
    TableEntry,
    TableHeader,
    check_file,
    read_manifest,
    read_table,
    read_table_header,
)
from mbridge_fsdp_ckpt.storage.source import RankRecord, StoredChunk
from mbridge_fsdp_ckpt.storage.values import decode, dtype_from_name


class SafeSource:
    """See `CheckpointSource`.

    Raises:
        NotACheckpointError, ManifestError, UnsupportedVersionError, DamagedCheckpointError: On opening.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._manifest = read_manifest(directory)
        self.identity = f"{directory.name} {self._manifest.checksum}"
        self.keys: Mapping[str, KeyEntry] = self._manifest.keys
        self.sections = self._manifest.sections
        self.topology = self._manifest.topology
        self.values: Mapping[str, Any] = decode(self._manifest.values)
        self._tables = [self._checked_table(entry) for entry in self._manifest.tables]

    @cached_property
    def _headers(self) -> list[TableHeader]:
        return [read_table_header(path) for path in self._tables]

    @cached_property
    def stateless(self) -> frozenset[str]:
        """Optimizer parameters saved without state."""
        return frozenset(name for header in self._headers for name in header.stateless)

    def hyperparameters(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """See `CheckpointSource`."""
        wanted, found = set(names), {}
        for header in self._headers:
            for group in header.parameter_groups:
                members = wanted.intersection(group.parameters)
                if members:
                    hyperparameters = decode(group.hyperparameters)
                    found.update(dict.fromkeys(members, hyperparameters))
                    wanted -= members
        return found

    def chunks(self, keys: Iterable[str]) -> dict[str, list[StoredChunk]]:
        """See `CheckpointSource`."""
        found: dict[str, list[StoredChunk]] = {key: [] for key in keys}
        for path, header in zip(self._tables, self._headers, strict=True):
            files: dict[int, Path] = {}
            for chunk in read_table(path, self._manifest.keys):
                if chunk.key not in found:
                    continue
                if chunk.file not in files:
                    files[chunk.file] = check_file(self.directory, header.files[chunk.file])
                stored = StoredChunk(
                    chunk.key, chunk.box, files[chunk.file], chunk.offset, chunk.length, chunk.checksum
                )
                found[chunk.key].append(stored)
        return found

    def read(self, chunk: StoredChunk) -> torch.Tensor:
        """See `CheckpointSource`."""
        data = read_bytes(chunk)
        if checksum(data) != chunk.checksum:
            raise DamagedCheckpointError(
                expected=f"{chunk.checksum} of {chunk.key} {chunk.box}",
                found=f"{checksum(data)} in bytes [{chunk.offset}, {chunk.offset + chunk.length})",
                remedy="The file was changed after it was written: use another checkpoint.",
                key=str(chunk.path),
            )
        dtype = dtype_from_name(self.keys[chunk.key].dtype)
        return elements(data, dtype, chunk.box)

    def ranks(self) -> Iterator[RankRecord]:
        """See `CheckpointSource`."""
        for header in self._headers:
            yield RankRecord(header.coordinates, decode(header.values), decode(header.extra_state))

    def _checked_table(self, entry: TableEntry) -> Path:
        path = check_file(self.directory, entry)
        found = file_checksum(path)
        if found != entry.checksum:
            raise DamagedCheckpointError(
                expected=entry.checksum,
                found=found,
                remedy="The table was changed after it was written: use another checkpoint.",
                key=str(path),
            )
        return path


def read_bytes(chunk: StoredChunk) -> bytearray:
    """A chunk's bytes; the file must not be a link.

    Raises:
        DamagedCheckpointError: The file ends too early.
        OSError: The file system refused.
    """
    data = bytearray(chunk.length)
    descriptor = os.open(chunk.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        filled, view = 0, memoryview(data)
        while filled < chunk.length:
            count = os.preadv(descriptor, [view[filled:]], chunk.offset + filled)
            if count == 0:
                raise DamagedCheckpointError(
                    expected=f"{chunk.length} bytes from byte {chunk.offset}",
                    found=f"{filled} bytes",
                    remedy="The file was truncated: use another checkpoint.",
                    key=str(chunk.path),
                )
            filled += count
    finally:
        os.close(descriptor)
    return data


def elements(data: bytearray, dtype: torch.dtype, box: Box) -> torch.Tensor:
    """Raw bytes as a tensor shaped like a box."""
    if not data:
        return torch.empty(box.size, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(box.size)
