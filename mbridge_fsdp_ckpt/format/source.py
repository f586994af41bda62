# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""An opened checkpoint, in this format or stock's: its metadata, and methods that read the rest on demand."""

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
"""The axes that decide which keys a rank has: ranks at the same place along them may use each other's records."""

_CHUNKS_KNOWN = 250_000  # at a time: some 130 MB
_NO_BYTES = ByteRange(0, 0)


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A block of a key, and where it lies in a file.  Only the source that made it uses the fields beyond the box.

    Args:
        key: The key.
        box: The block, in the global tensor.
        path: The file.
        record: The range of bytes to read.  It is a whole record, the raw elements with the bytes that `torch.save`
            writes around them, which has one checksum; or, if the box is part of a record, the blocks that cover it.
        checksum: The checksum of the whole record; empty where the format has none.
        elements_at: The offset in `record` of the box's raw elements, if they can be read without unpickling.
        data: The raw elements, if the index holds them; there is no record then.
        sums: The range of bytes that holds the checksums of the record's blocks; empty if the whole record is read.
        first_block: The number of the first block that is read.
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
    """What one saving rank recorded about itself.

    Args:
        coordinates: The rank's place along each axis of the job: tensor, pipeline, expert, data, ...
        values: The `rank_values` that were passed to `save` on that rank; empty if there were none.
        extra_state: The FP8 scaling state of the rank's modules, by key; empty if there was none.
        stateless: The optimizer's names of parameters that the rank saved without state.
    """

    coordinates: Mapping[str, int]
    values: Mapping[str, Any]
    extra_state: Mapping[str, Any] = field(default_factory=dict)
    stateless: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Metadata:
    """The metadata of a whole checkpoint.  It is checked, and made once, when the checkpoint is opened.

    Args:
        directory: The checkpoint's directory, held open: a directory that replaces it meanwhile is not read.
        identity: The name and the metadata's checksum, by which ranks compare the checkpoints that they opened.
        format: `FORMAT_NAME` or `STOCK_FORMAT`.
        sections: The saved sections: "model", "optimizer".
        keys: The description of every tensor of model and optimizer, by key.
        values: Non-tensor state that belongs to no single rank.
        topology: The parallel sizes of the saving job; empty where only the records of ranks have them (`sizes_of`).
        files: Files beside payload and index files, with their checksums; stock lists none.
        families: The families that split keys, as `name/version`, each with one of the keys.
        chunks: The number of chunks over all keys; 0 where all of them are in memory.
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
    """An opened checkpoint: its metadata is checked, and everything else is read when a method needs it.

    A method that cannot read a file raises a `CheckpointError` that names it: `ManifestError` if the file contradicts
    the format, `DamagedCheckpointError` if it is missing or its bytes were changed.  If the storage fails, it raises
    `OSError`.
    """

    @property
    def metadata(self) -> Metadata:
        """The metadata of the whole checkpoint."""

    def look_near(self, ranks: Iterable[int]) -> None:
        """Hint that these saving ranks, too, probably wrote the keys that are looked up next."""

    def chunks(
        self, keys: Iterable[str], needed: Mapping[str, Sequence[Box]] | None = None
    ) -> dict[str, list[StoredChunk]]:
        """Look up where keys lie.

        Args:
            keys: Keys of the metadata.
            needed: The blocks that are needed of each key; None means all of it.

        Returns:
            For each key the chunks that overlap a needed block, and perhaps others, in no order.  A chunk may leave out
            rows that are not needed.  Every box is inside its key, and every file exists at its full size.  Whether the
            boxes cover the needed blocks is not checked.

        Raises:
            ManifestError: The index contradicts the metadata, or itself.
            DamagedCheckpointError: A file of a key that was asked for is missing, or of another size.
        """

    def read(self, chunk: StoredChunk, *, verify: bool = True, scratch: Scratch | None = None) -> torch.Tensor:
        """A chunk's elements on the host, shaped like its box, in the dtype of its key.

        Args:
            chunk: From `chunks`.
            verify: Whether to compare the record's checksum, where the format has one.
            scratch: Memory in which the elements may lie; they are valid until it is used again.

        Raises:
            DamagedCheckpointError: The file is missing or too short, or its bytes were changed.
        """

    def read_rows(
        self, chunk: StoredChunk, scratch: Scratch, *, verify: bool = True
    ) -> Iterator[tuple[Box, torch.Tensor]]:
        """Read a chunk some rows at a time; yields their box and elements, which are valid until the next rows.

        Args:
            chunk: From `chunks`.
            scratch: Memory that the elements pass through.
            verify: Whether to compare checksums; rows are yielded before the last checksum is compared.

        Raises:
            DamagedCheckpointError: The file is missing or too short, or its bytes were changed.  It may be raised after
                the last rows.
        """

    def read_part(self, chunk: StoredChunk, place: Place, scratch: Scratch, *, verify: bool = True) -> None:
        """Read a chunk, a part of it straight into its destination.

        Args:
            chunk: From `chunks`.
            place: The memory of that part, and its offset in bytes from the chunk's first element.
            scratch: Memory that the rest of the chunk passes through.
            verify: Whether to compare checksums; the part is in its destination before they are compared.

        Raises:
            DamagedCheckpointError: The file is missing or too short, or its bytes were changed.
        """

    def reading_ahead(self, chunks: Iterable[StoredChunk]) -> AbstractContextManager[None]:
        """A block in which chunks are read from the disk in advance.

        Args:
            chunks: From `chunks`, in the order in which they will be read or verified.
        """

    def verify(self, chunk: StoredChunk, scratch: Scratch) -> None:
        """Raise the errors that `read` would raise, and keep nothing.

        Args:
            chunk: From `chunks`.
            scratch: Memory that the bytes pass through, where they need any.
        """

    def hyperparameters(self, names: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """Saved hyperparameters by optimizer parameter, for those that have some.

        Args:
            names: The optimizer's names of the parameters to look up, best those of a whole param group, which can be
                looked up at once.  None means all.
        """

    def slots(self, name: str) -> dict[str, KeyEntry]:
        """The slots of one component, by its name in the optimizer's state, with their descriptions."""

    def stateless(self, names: Iterable[str]) -> set[str]:
        """The names among these of optimizer parameters that were saved without state."""

    def share(self, index: int, count: int) -> Sequence[str]:
        """One of `count` shares of all keys, which together contain each key once."""

    def ranks(self) -> Iterator[RankRecord]:
        """The record of each saving rank; in stock's format, one record for each (pipeline, tensor) place."""

    def near(self, place: Mapping[str, int]) -> tuple[RankRecord | None, RankRecord | None]:
        """The records of the rank that saved at a place, and of a rank at the same place along `AT_PLACE`.

        Each is None where there is no such rank.
        """

    def states(self, modules: Iterable[str]) -> Iterator[RankRecord]:
        """The records of all ranks that have FP8 state of some modules."""


def slots_in(find: Callable[[str], KeyEntry | None], name: str, slots: Iterable[str]) -> dict[str, KeyEntry]:
    """The descriptions of those slots whose keys are found; see `CheckpointSource.slots`.

    Args:
        find: Takes a key and returns its description; None where it does not exist.
        name: The component's name in the optimizer's state.
        slots: The names of the slots to look for.
    """
    found = ((slot, find(slot_key(name, slot))) for slot in slots)
    return {slot: entry for slot, entry in found if entry is not None}


def sizes_of(places: Iterable[Mapping[str, int]]) -> dict[str, int | str]:
    """The pipeline- and tensor-parallel sizes of a job, from the places of its ranks."""
    known = list(places)
    found = {axis: [place[axis] for place in known if axis in place] for axis in ("pipeline", "tensor")}
    return {axis: 1 + max(numbers) for axis, numbers in found.items() if numbers}


def batches(keys: list[str], *sources: CheckpointSource) -> Iterator[list[str]]:
    """Keys in groups whose chunks fit into memory."""
    chunks = max(source.metadata.chunks for source in sources)
    count = max(1, len(keys) * _CHUNKS_KNOWN // max(chunks, 1))
    yield from (keys[start : start + count] for start in range(0, len(keys), count))
