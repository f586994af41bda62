# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Writing a checkpoint of this format from another one, in one process and in bounded memory.

    source  chunk by chunk, each verified as it is read      one key after another, rows in order
    blocks  cut out of them                                  at most one in memory
    target  payload of up to `_OPEN_FILES` writers at a time, then their index, then the metadata

Memory: one chunk of the source, one block of the target, up to `KEPT_BYTES` of chunks that the next block needs too,
and what the metadata and the index of the writers at hand say of the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import batched
from pathlib import Path
from typing import Protocol

import torch

from mbridge_fsdp_ckpt.commit import removal
from mbridge_fsdp_ckpt.commit.content import Commit
from mbridge_fsdp_ckpt.commit.finishing import finish, metadata
from mbridge_fsdp_ckpt.errors import InternalError
from mbridge_fsdp_ckpt.format.names import Files, payload_name, token
from mbridge_fsdp_ckpt.format.own_index import RankIndex
from mbridge_fsdp_ckpt.format.payload import PayloadWriter, number_of
from mbridge_fsdp_ckpt.format.rows import Row
from mbridge_fsdp_ckpt.format.source import StoredChunk
from mbridge_fsdp_ckpt.format.values import decode_mapping
from mbridge_fsdp_ckpt.format.write_results import WriteResult, together, write_group_index, write_own_index
from mbridge_fsdp_ckpt.io.host_bytes import host_pieces
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.plan.boxes import Box, whole
from mbridge_fsdp_ckpt.plan.dtypes import bits, dtype_from_name
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.tools.convert.description import Description, Record, covering

KEPT_BYTES = 1 << 29
"""Of source chunks that more than one block of the target needs; a chunk over it is read again for each of them."""

_OPEN_FILES = 256


class Chunks(Protocol):
    """What tensors come from: a `CheckpointSource`, as far as it is asked here."""

    def chunks(self, keys: Iterable[str]) -> dict[str, list[StoredChunk]]:
        """See `CheckpointSource`."""

    def read(self, chunk: StoredChunk, *, verify: bool = True) -> torch.Tensor:
        """See `CheckpointSource`."""


Shares = Callable[[str, KeyEntry, Sequence[StoredChunk]], Iterable[tuple[int, Box]]]
"""The blocks of a key in the order of their rows, each with its writer; given the key's chunks in the source."""


@dataclass(frozen=True, slots=True)
class Rewriting:
    """What to write.

    Args:
        source: Where tensors come from.
        description: What the checkpoint says besides tensors; its records have an index file each.
        shares: How tensors are cut.
        writers: Ranks that may get blocks; each has an index file.
        batches: All keys, in groups whose chunks may be known at a time.
        add_files: Puts further files into a directory.
        stock_view: Whether to write DCP metadata of so many chunks.
        progress: Gets the bytes of elements written since its last call.
        last_call: Called just before the step that cannot be undone.
    """

    source: Chunks
    description: Description
    shares: Shares
    writers: Sequence[int]
    batches: Sequence[Sequence[str]]
    add_files: Callable[[Path], None]
    stock_view: Callable[[int], bool]
    progress: Callable[[int], None] = lambda count: None
    last_call: Callable[[], None] = lambda: None


@dataclass(slots=True)
class _Writer:
    """One rank of the target; its payload file is there once it has a chunk."""

    path: AnyPath
    payload: PayloadWriter | None = None
    rows: list[Row] = field(default_factory=list)
    keys: dict[str, KeyEntry] = field(default_factory=dict)

    def add(self, key: str, entry: KeyEntry, elements: torch.Tensor, box: Box) -> None:
        """Write a block."""
        if not entry.is_sharded:
            self.rows.append(number_of(key, elements))
        else:
            self.payload = self.payload or PayloadWriter(self.path)
            self.rows += self.payload.add_block(key, elements.dtype, host_pieces(elements), box)
        self.keys[key] = entry


def rewrite(commit: Commit, work: Rewriting) -> int:
    """Write a checkpoint and commit it; returns how many payload files it has.

    Raises:
        DamagedCheckpointError, ManifestError: The source is damaged.  Nothing was committed.
        OSError: The storage refused.
    """
    result, payloads, files = [], 0, Files(token(), commit.suffix)
    ranks = sorted({*work.writers, *work.description.records})
    for group in batched(ranks, _OPEN_FILES):
        written = _write_payload(commit, work, group, ranks[0])
        own = [_write_index(commit, files, work.description, rank, written.get(rank), ranks[0]) for rank in group]
        result.append(write_group_index(commit.directory, files, group[0], together(own)))
        payloads += sum(writer.payload is not None for writer in written.values())
    _finish(commit, work, files, together(result))
    return payloads


def _write_payload(commit: Commit, work: Rewriting, group: Sequence[int], first: int) -> dict[int, _Writer]:
    """The blocks of some writers, key by key: every chunk of the source that they need is read once."""
    writers: dict[int, _Writer] = {}
    empty_by = min(work.writers, default=first)  # tensors without elements are no blocks, but have a key
    wanted = set(group).intersection([*work.writers, empty_by])
    try:
        for batch in work.batches if wanted else ():
            chunks = work.source.chunks(batch)
            for key in batch:
                entry = work.description.keys[key]
                tiling = covering(key, entry, chunks.pop(key))
                reader = _Blocks(work.source, entry, tiling)
                shares = work.shares(key, entry, tiling) if tiling else [(empty_by, whole(entry.shape))]
                for rank, box in shares:
                    if rank not in wanted:
                        continue
                    if rank not in writers:
                        writers[rank] = _Writer(commit.directory / payload_name(rank, commit.suffix))
                    writers[rank].add(key, entry, reader.block(box).reshape(-1), box)
                    work.progress(entry.bytes_of(box.volume))
    except BaseException:
        for writer in writers.values():
            if writer.payload is not None:
                writer.payload.abort()
        raise
    return writers


class _Blocks:
    """Blocks of one key, asked for in the order of their rows, out of the chunks of the source."""

    def __init__(self, source: Chunks, entry: KeyEntry, chunks: Sequence[StoredChunk]) -> None:
        self._source, self._chunks, self._dtype = source, chunks, dtype_from_name(entry.dtype)
        self._next = 0
        self._kept: dict[StoredChunk, torch.Tensor] = {}

    def block(self, box: Box) -> torch.Tensor:
        """The elements of a block."""
        begin, end = _rows(box)
        for chunk in [chunk for chunk in self._kept if _rows(chunk.box)[1] <= begin]:
            del self._kept[chunk]
        touching = self._touching(box)
        if [chunk.box for chunk in touching] == [box]:
            return self._read(touching[0], end)
        block = torch.empty(box.size, dtype=self._dtype)
        for chunk in touching:
            common = box.intersect(chunk.box)
            if common is None:
                raise InternalError(
                    expected=f"a chunk that touches {box}", found=f"{chunk.box}", remedy="Report it.", key=chunk.key
                )
            elements = bits(self._read(chunk, end))
            bits(block)[common.slices_in(box)] = elements[common.slices_in(chunk.box)]
        return block

    def _touching(self, box: Box) -> list[StoredChunk]:
        begin, end = _rows(box)
        while _rows(self._chunks[self._next].box)[1] <= begin:
            self._next += 1
        found = []
        for chunk in self._chunks[self._next :]:
            if _rows(chunk.box)[0] >= end:
                break
            if not box.size or chunk.box.intersect(box) is not None:
                found.append(chunk)
        return found

    def _read(self, chunk: StoredChunk, end: int) -> torch.Tensor:
        """A chunk's elements; kept for the next block if it reaches into it and there is room."""
        if chunk in self._kept:
            return self._kept[chunk]
        elements = self._source.read(chunk)
        used = sum(tensor.nbytes for tensor in self._kept.values())
        if _rows(chunk.box)[1] > end and used + elements.nbytes <= KEPT_BYTES:
            self._kept[chunk] = elements
        return elements


def _rows(box: Box) -> tuple[int, int]:
    """First row and one past the last; a scalar is one row."""
    return (box.offset[0], box.end[0]) if box.size else (0, 1)


def _write_index(
    commit: Commit, files: Files, description: Description, rank: int, writer: _Writer | None, first: int
) -> WriteResult:
    """Write a rank's index file; the first one's has what belongs to no rank."""
    record = description.records.get(rank, Record({"rank": rank}))
    parameters, writer = description.parameters, writer or _Writer(commit.directory)
    said = RankIndex(
        rank=rank,
        coordinates=record.coordinates,
        payload=writer.payload.close() if writer.payload is not None else None,
        keys=writer.keys,
        parameters=parameters.sets if rank == first else {},
        stateless=description.stateless if rank == first else (),
        states=record.states,
        own=record.own,
    )
    hyperparameters = parameters.hyperparameters if rank == first else {}
    return write_own_index(commit.directory, files, said, writer.rows, hyperparameters)


def _finish(commit: Commit, work: Rewriting, files: Files, result: WriteResult) -> None:
    said = work.description
    manifest = metadata(
        writer=said.writer,
        topology=said.topology,
        sections=said.sections,
        files=files,
        result=result,
        directory=commit.directory,
        values=said.values,
    )
    view_of = decode_mapping(said.values) if work.stock_view(result["chunks"]) else None
    replaced = finish(
        commit,
        manifest,
        view_of=view_of,
        add_files=work.add_files,
        progress=lambda: work.progress(0),
        last_call=work.last_call,
    )
    removal.delete_later(replaced)
