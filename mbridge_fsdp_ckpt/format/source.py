# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What an opened checkpoint is, in this format or stock's: metadata, and what can be asked of the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from mbridge_fsdp_ckpt.io.entries import ExtraEntry
from mbridge_fsdp_ckpt.io.ranges import ByteRange, Place, Scratch
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.keys import KeyEntry, Section, slot_key

AT_PLACE = ("pipeline", "tensor")
"""The axes along which ranks have the same keys, and may share what is a rank's own."""

_CHUNKS_KNOWN = 250_000  # at a time: some 130 MB
_NO_BYTES = ByteRange(0, 0)


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A box of a key, and where it lies.  Opaque beyond its box: only its source reads it.

    Args:
        key: The key.
        box: The block of it.
        path: The file.
        record: The bytes that are read: the raw elements, and what was written around them, which are verified as one;
            or blocks of elements of a record of which the box is a part.
        checksum: Of the whole record; empty where the format has none.
        elements_at: Where in these bytes the box's raw elements begin, if they can be read without unpickling.
        data: The raw elements, where the index has them: there is no record.
        sums: Where the checksums of blocks are that blocks are verified with; nowhere if the whole record is read.
        first_block: The number of the first one that is read.
    """

    key: str
    box: Box
    path: AnyPath
    record: ByteRange = _NO_BYTES
    checksum: str = ""
    elements_at: int = 0
    data: bytes = b""
    sums: ByteRange = _NO_BYTES
    first_block: int = 0


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What one saving rank wrote of itself.

    Args:
        coordinates: Its rank on each axis of the job: tensor, pipeline, expert, data, ...
        values: What it gave `save` as `rank_values`; empty where it gave none.
        extra_state: FP8 scaling state of its modules, by key; empty where it had none.
        stateless: Names of optimizer parameters that it saved without state.
    """

    coordinates: Mapping[str, int]
    values: Mapping[str, Any]
    extra_state: Mapping[str, Any] = field(default_factory=dict)
    stateless: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a checkpoint says of itself as a whole; checked, and made once, when it is opened.

    Args:
        directory: Where it lies, held on to: what takes its place meanwhile is not read.
        identity: What tells it from another: its name and its metadata's checksum.
        format: `FORMAT_NAME` or `STOCK_FORMAT`.
        sections: What was saved: "model", "optimizer".
        keys: Every tensor of model and optimizer.
        values: Non-tensor state that belongs to no rank.
        topology: The saving job's sizes; empty where only its ranks' places tell them, see `sizes_of`.
        files: Files beside payload and index files, with their checksums; stock lists none.
        families: Those that split keys, `name/version`, each with one of the keys.
        chunks: How many there are over all keys; 0 where all are known in memory.
    """

    directory: AnyPath
    identity: str
    format: str
    sections: tuple[Section, ...]
    keys: Mapping[str, KeyEntry]
    values: Mapping[str, Any]
    topology: Mapping[str, int | str] = field(default_factory=dict)
    files: tuple[ExtraEntry, ...] = ()
    families: Mapping[str, str] = field(default_factory=dict)
    chunks: int = 0


class CheckpointSource(Protocol):
    """An opened checkpoint: its metadata is checked, of the rest no more is read than a call asks for.

    What a method cannot read is a `CheckpointError` that names the file: `ManifestError` where the file contradicts the
    format, `DamagedCheckpointError` where it is not there or not what was written.  A storage that refuses is an
    `OSError`.
    """

    @property
    def metadata(self) -> Metadata:
        """What it says of itself as a whole."""

    def look_near(self, ranks: Iterable[int]) -> None:
        """Say that these ranks, too, probably wrote what is going to be asked for."""

    def chunks(
        self, keys: Iterable[str], needed: Mapping[str, Sequence[Box]] | None = None
    ) -> dict[str, list[StoredChunk]]:
        """Where keys lie.

        Args:
            keys: Keys of the metadata.
            needed: What is needed of each; None means all of it.

        Returns:
            For each key its chunks that have something needed, perhaps others, in no order, each perhaps without rows
            that have nothing needed; every box is inside its key, every file is there at its full size.  Whether the
            boxes cover what is needed is not checked.

        Raises:
            ManifestError: The index contradicts the metadata, or itself.
            DamagedCheckpointError: A file of a key that was asked for is missing, or of another size.
        """

    def read(self, chunk: StoredChunk, *, verify: bool = True, scratch: Scratch | None = None) -> torch.Tensor:
        """A chunk's elements on the host, shaped like its box, in the dtype of its key.

        Args:
            chunk: From `chunks`.
            verify: Whether to compare the record's checksum, where the format has one.
            scratch: Where they may lie; they are gone when it is used again.

        Raises:
            DamagedCheckpointError: The file is gone or too short, or the bytes are not those that were written.
        """

    def read_rows(
        self, chunk: StoredChunk, scratch: Scratch, *, verify: bool = True
    ) -> Iterator[tuple[Box, torch.Tensor]]:
        """A chunk's elements, some rows at a time, each with their box and until the next ones are taken.

        Args:
            chunk: From `chunks`.
            scratch: Memory that they pass through.
            verify: Whether to compare checksums; rows have been handed out before the last one is compared.

        Raises:
            DamagedCheckpointError: The file is gone or too short, or bytes were changed; perhaps after the last rows.
        """

    def read_part(self, chunk: StoredChunk, place: Place, scratch: Scratch, *, verify: bool = True) -> None:
        """Read a chunk of which a part goes straight to where it is wanted.

        Args:
            chunk: From `chunks`.
            place: The memory of that part; it starts so many bytes after the chunk's first element.
            scratch: Memory that the rest passes through.
            verify: Whether to compare checksums; bytes are in their place before they are compared.

        Raises:
            DamagedCheckpointError: The file is gone or too short, or the bytes are not those that were written.
        """

    def reading_ahead(self, chunks: Iterable[StoredChunk]) -> AbstractContextManager[None]:
        """A context in which chunks are on their way from the disk before they are asked for.

        Args:
            chunks: From `chunks`, in the order in which they will be read or verified.
        """

    def verify(self, chunk: StoredChunk, scratch: Scratch) -> None:
        """Raise what `read` would, and keep nothing.

        Args:
            chunk: From `chunks`.
            scratch: Memory that the bytes pass through, where they need any.
        """

    def hyperparameters(self, names: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """Saved hyperparameters by optimizer parameter, for those that have some.

        Args:
            names: The parameters that are of interest, by the optimizer's name, best a whole param group: it is known
                as such to the rank that saved it.  None means all.
        """

    def slots(self, name: str) -> dict[str, KeyEntry]:
        """The slots of one component, by its name in the optimizer's state, with their descriptions."""

    def stateless(self, names: Iterable[str]) -> set[str]:
        """Those of some optimizer parameters that were saved without state."""

    def share(self, index: int, count: int) -> Sequence[str]:
        """One of `count` shares of all keys, which together have each key once."""

    def ranks(self) -> Iterator[RankRecord]:
        """What each saving rank said of itself; of stock, one record for each (pipeline, tensor) place."""

    def near(self, place: Mapping[str, int]) -> tuple[RankRecord | None, RankRecord | None]:
        """The record of the rank that saved at a place, and that of one at the same place along `AT_PLACE`; or None."""

    def states(self, modules: Iterable[str]) -> Iterator[RankRecord]:
        """The records of all ranks that have FP8 state of some modules."""


def slots_in(find: Callable[[str], KeyEntry | None], name: str, slots: Iterable[str]) -> dict[str, KeyEntry]:
    """See `CheckpointSource.slots`: of some slots, those whose keys are found."""
    found = ((slot, find(slot_key(name, slot))) for slot in slots)
    return {slot: entry for slot, entry in found if entry is not None}


def sizes_of(places: Iterable[Mapping[str, int]]) -> dict[str, int | str]:
    """Sizes of a job, as far as the places of its ranks tell them."""
    known = list(places)
    found = {axis: [place[axis] for place in known if axis in place] for axis in ("pipeline", "tensor")}
    return {axis: 1 + max(numbers) for axis, numbers in found.items() if numbers}


def batches(keys: list[str], *sources: CheckpointSource) -> Iterator[list[str]]:
    """Keys in groups whose chunks fit into memory."""
    chunks = max(source.metadata.chunks for source in sources)
    count = max(1, len(keys) * _CHUNKS_KNOWN // max(chunks, 1))
    yield from (keys[start : start + count] for start in range(0, len(keys), count))
