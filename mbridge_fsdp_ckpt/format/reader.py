# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Reading this format: by its metadata and its index, no unpickling, every bound checked before the first payload byte.

A load asks for little: first the index file that the rank of the same number wrote, which has all that the same layout
needs; for what it does not cover, the directories of the groups' index files, and of their rows the wanted keys'.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from mbridge_fsdp_ckpt.format import columns
from mbridge_fsdp_ckpt.format.columns import chunks_of
from mbridge_fsdp_ckpt.format.directory import Directory, IndexedKeys
from mbridge_fsdp_ckpt.format.index import IndexFile
from mbridge_fsdp_ckpt.format.indexes import Indexes
from mbridge_fsdp_ckpt.format.manifest import listed_files, read_manifest
from mbridge_fsdp_ckpt.format.names import FORMAT_NAME, MANIFEST_NAME, Files
from mbridge_fsdp_ckpt.format.rows import Chunk
from mbridge_fsdp_ckpt.format.schema import Manifest
from mbridge_fsdp_ckpt.format.source import AT_PLACE, Metadata, RankRecord, StoredChunk, slots_in
from mbridge_fsdp_ckpt.format.values import decode_mapping, decode_mapping_or_null
from mbridge_fsdp_ckpt.format.verified import RecordHashes, check, hasher_for, stored
from mbridge_fsdp_ckpt.io.checksums import HASHED_AT_ONCE
from mbridge_fsdp_ckpt.io.entries import FileEntry
from mbridge_fsdp_ckpt.io.files import check_file, hold, malformed
from mbridge_fsdp_ckpt.io.host_bytes import elements
from mbridge_fsdp_ckpt.io.prefetch import Range
from mbridge_fsdp_ckpt.io.ranges import OpenFiles, Place, Scratch
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.plan.records import records_of
from mbridge_fsdp_ckpt.plan.tiling import tiling_defect


class SafeSource:
    """See `CheckpointSource`.

    Args:
        directory: The iteration directory.
        near: In a load, ranks whose index files are looked at first: the loading rank, then those with copies of what
            it holds.  Ranks of these numbers wrote what the same layout needs.  `look_near` adds to them.
        manifest: The metadata, where it is not written yet.

    Raises:
        NotACheckpointError, ManifestError, UnsupportedVersionError: On opening.
    """

    def __init__(self, directory: AnyPath, near: Sequence[int] = (), manifest: Manifest | None = None) -> None:
        directory = hold(directory)
        self._opened = OpenFiles()
        self.manifest = manifest = manifest or read_manifest(directory)
        self.files = Files(manifest.save, manifest.suffix)
        self._indexes = Indexes(directory, manifest, near, self._opened)
        self._payload: dict[tuple[str, int], AnyPath] = {}
        self._decoded: dict[int, dict[str, Any]] = {}
        self._directory = directory
        self.metadata = Metadata(
            directory=directory,
            identity=f"{directory.name} {manifest.checksum}",
            format=FORMAT_NAME,
            sections=manifest.sections,
            keys=IndexedKeys(self._indexes.entry, self._indexes.entries, manifest.keys),
            values=decode_mapping(manifest.values),
            topology=manifest.topology,
            files=listed_files(manifest),
            families=manifest.families,
            chunks=manifest.chunks,
        )

    def look_near(self, ranks: Iterable[int]) -> None:
        """See `CheckpointSource`."""
        self._indexes.near_ranks += ranks

    @property
    def index(self) -> Directory:
        """The directories of all groups' index files."""
        return self._indexes.all

    def own_index(self, rank: int) -> IndexFile:
        """The index file that a rank wrote; see `Indexes`."""
        return self._indexes.of_rank(rank)

    def hyperparameters(self, names: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """See `CheckpointSource`."""
        if names is None:
            return {name: self._hyperparameters(hashed) for name, hashed in self.parameters().items()}
        names = list(names)
        param_group = columns.param_group_name(names)
        for file in self._indexes.near():
            for place in file.find_names(columns.PARAM_GROUP, param_group):
                return {name: self._hyperparameters(int(file.names["value"][place])) for name in names}
        found = {}
        for name in names:
            for file, place in self._indexes.names(columns.PARAMETER, name):
                found[name] = self._hyperparameters(int(file.names["value"][place]))
                break
        return found

    def parameters(self) -> dict[str, int]:
        """All optimizer parameters with the checksum of their hyperparameters; what the first group says counts."""
        found: dict[str, int] = {}
        for group in self.index.groups:
            for place in np.flatnonzero(group.names["kind"] == columns.PARAMETER).tolist():
                found.setdefault(group.text_of_name(place), int(group.names["value"][place]))
        return found

    def _hyperparameters(self, hashed: int) -> dict[str, Any]:
        if hashed not in self._decoded:
            encoded = self.manifest.hyperparameters.get(f"{hashed:016x}")
            if encoded is None:
                known = ", ".join(sorted(self.manifest.hyperparameters)[:3])
                path = self._directory / MANIFEST_NAME
                raise malformed(path, f"hyperparameters {hashed:016x}, which the index refers to", known or "none")
            self._decoded[hashed] = decode_mapping(encoded)
        return dict(self._decoded[hashed])

    def slots(self, name: str) -> dict[str, KeyEntry]:
        """See `CheckpointSource`: a rank's own index that has a sharded slot of a component has all slots of it."""
        found: dict[str, KeyEntry] = {}
        for file in self._indexes.near():
            found |= slots_in(file.described, name, self.manifest.slots)
            if any(entry.is_sharded for entry in found.values()):
                return found
        return slots_in(self.metadata.keys.get, name, self.manifest.slots)

    def stateless(self, names: Iterable[str]) -> set[str]:
        """See `CheckpointSource`."""
        return {name for name in names if any(True for _ in self._indexes.names(columns.STATELESS, name))}

    def share(self, index: int, count: int) -> list[str]:
        """See `CheckpointSource`."""
        return [
            group.text_of_key(int(place))
            for group in self.index_files(index, count)
            for place in np.flatnonzero(group.keys["origins"])
        ]

    def index_files(self, index: int = 0, count: int = 1) -> Iterator[IndexFile]:
        """One of `count` shares of the groups' index files."""
        return self._indexes.share(index, count)

    def chunks(
        self, keys: Iterable[str], needed: Mapping[str, Sequence[Box]] | None = None
    ) -> dict[str, list[StoredChunk]]:
        """See `CheckpointSource`."""
        found: dict[str, list[StoredChunk]] = {key: [] for key in keys}
        rest = set(found)
        for file in self._indexes.near():
            if needed is None or not rest:
                break
            places = {place: key for key in rest if (place := file.find(key)) is not None}
            self._collect(file, dict(sorted(places.items())), found, needed)
            rest = {key for key in rest if not _covered(found[key], needed.get(key, ()))}
            found |= {key: [] for key in rest}
        if rest:
            for group, places in self.index.by_group(rest):
                self._collect(group, places, found, needed)
        return found

    def _collect(
        self,
        file: IndexFile,
        places: Mapping[int, str],
        found: dict[str, list[StoredChunk]],
        needed: Mapping[str, Sequence[Box]] | None,
    ) -> None:
        sharded = [place for place, key in places.items() if file.entry(place).is_sharded]
        for place in places.keys() - set(sharded):
            key = places[place]
            found[key].append(StoredChunk(key, Box((), ()), file.path, data=file.number(place)))
        for place, rows in file.rows(sharded):
            key, entry = places[place], file.entry(place)
            boxes = None if needed is None else needed.get(key, ())
            for rank, chunk in chunks_of(key, rows, entry, boxes):
                found[key].append(self._stored(file, chunk, rank, boxes))

    def _stored(self, file: IndexFile, chunk: Chunk, rank_there: int, boxes: Sequence[Box] | None) -> StoredChunk:
        """A chunk, or that part of it that has what is needed."""
        place = file.path.name, rank_there
        if place not in self._payload:
            rank, size, _ = file.ranks[rank_there].tolist()
            entry = FileEntry(name=self.files.payload(rank), size=size, checksum="")
            self._payload[place] = check_file(self._directory, entry, file.path.name)
        return stored(chunk, self._payload[place], boxes)

    def read(self, chunk: StoredChunk, *, verify: bool = True, scratch: Scratch | None = None) -> torch.Tensor:
        """See `CheckpointSource`."""
        dtype = dtype_from_name(self.metadata.keys[chunk.key].dtype)
        if chunk.data:
            return elements(np.frombuffer(bytearray(chunk.data), dtype=np.uint8), dtype, chunk.box)
        hasher = hasher_for(chunk, dtype.itemsize) if verify else None
        record = self._opened.read(chunk.path, *chunk.record, hasher, scratch)
        if hasher is not None:
            check(chunk, hasher, self._opened)
        begin, size = chunk.elements_at, chunk.box.volume * dtype.itemsize
        return elements(record[begin : begin + size], dtype, chunk.box)

    def read_rows(
        self, chunk: StoredChunk, scratch: Scratch, *, verify: bool = True
    ) -> Iterator[tuple[Box, torch.Tensor]]:
        """See `CheckpointSource`."""
        dtype = dtype_from_name(self.metadata.keys[chunk.key].dtype)
        if chunk.record.length <= HASHED_AT_ONCE:
            yield chunk.box, self.read(chunk, verify=verify, scratch=scratch)
            return
        hasher = hasher_for(chunk, dtype.itemsize) if verify else None
        boxes = list(records_of(chunk.box, dtype.itemsize, HASHED_AT_ONCE))
        lengths = [chunk.elements_at, *(box.volume * dtype.itemsize for box in boxes)]
        lengths.append(chunk.record.length - sum(lengths))
        pieces = self._opened.read_each(chunk.path, chunk.record.offset, lengths, hasher, scratch)
        for box, data in zip((None, *boxes, None), pieces, strict=True):
            if box is not None:
                yield box, elements(data, dtype, box)
        if hasher is not None:
            check(chunk, hasher, self._opened)

    def read_part(self, chunk: StoredChunk, place: Place, scratch: Scratch, *, verify: bool = True) -> None:
        """See `CheckpointSource`."""
        hasher = self._hasher(chunk) if verify else None
        in_record = Place(chunk.elements_at + place.start, place.memory)
        self._opened.read_part(chunk.path, *chunk.record, in_record, hasher, scratch)
        if hasher is not None:
            check(chunk, hasher, self._opened)

    def reading_ahead(self, chunks: Iterable[StoredChunk]) -> AbstractContextManager[None]:
        """See `CheckpointSource`."""
        places = ((chunk.path, place) for chunk in chunks for place in (chunk.record, chunk.sums))
        return self._opened.reading_ahead(Range(path, *place) for path, place in places if place.length)

    def verify(self, chunk: StoredChunk, scratch: Scratch) -> None:
        """See `CheckpointSource`; an index was verified when it was read."""
        if not chunk.data:
            hasher = self._hasher(chunk)
            self._opened.pass_through(chunk.path, *chunk.record, hasher, scratch)
            check(chunk, hasher, self._opened)

    def _hasher(self, chunk: StoredChunk) -> RecordHashes:
        return hasher_for(chunk, dtype_from_name(self.metadata.keys[chunk.key].dtype).itemsize)

    def own_indexes(self) -> Iterator[tuple[int, IndexFile]]:
        """What every rank wrote, by rank."""
        for rank in sorted(rank for group in self.index.groups for rank in group.ranks["rank"].tolist()):
            yield rank, self.own_index(rank)

    def ranks(self) -> Iterator[RankRecord]:
        """See `CheckpointSource`."""
        for _, own in self.own_indexes():
            yield self._record(own)

    def near(self, place: Mapping[str, int]) -> tuple[RankRecord | None, RankRecord | None]:
        """See `CheckpointSource`."""
        for near in self._indexes.near():
            if near.coordinates_of() == place:
                exact = self._record(near)
                return exact, exact
            break
        first: int | None = None
        for group in self.index.groups:
            for number in group.ranks_at(place, AT_PLACE):
                first = int(group.ranks["rank"][number]) if first is None else first
                if group.coordinates_of(number) == place:
                    exact = self._record(self.own_index(int(group.ranks["rank"][number])))
                    return exact, exact
        return None, None if first is None else self._record(self.own_index(first))

    def states(self, modules: Iterable[str]) -> Iterator[RankRecord]:
        """See `CheckpointSource`."""
        if not self.manifest.states:
            return
        ranks = {
            int(group.ranks["rank"][int(group.names["rank"][place])])
            for module in modules
            for group, place in self.index.names(columns.STATE, module)
        }
        yield from (self._record(self.own_index(rank)) for rank in sorted(ranks))

    def _record(self, own: IndexFile) -> RankRecord:
        record = own.record()
        stateless = tuple(
            own.text_of_name(place) for place in np.flatnonzero(own.names["kind"] == columns.STATELESS).tolist()
        )
        values, extra_state = map(decode_mapping_or_null, (record.values, record.extra_state))
        return RankRecord(own.coordinates_of(), values, extra_state, stateless)


def _covered(chunks: Sequence[StoredChunk], boxes: Sequence[Box]) -> bool:
    """Whether chunks have every element of some boxes, once."""
    held = [chunk.box for chunk in chunks]
    return not boxes or (bool(held) and not any(tiling_defect(box, held) for box in boxes))
