"""What a load reads from: one narrow interface over this format and stock `fsdp_dtensor`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.keys import KeyEntry, Section
from mbridge_fsdp_ckpt.storage.ranges import Scratch
from mbridge_fsdp_ckpt.storage.store import AnyPath


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A box of a key, and where it lies.  Opaque beyond its box: only its source reads it.

    Args:
        key: The key.
        box: The block of it.
        path: The file.
        offset: First byte of its record.
        length: Bytes of its record.
        checksum: Of those bytes; empty where the format has none.
        start: First byte of the raw elements in the record, where they can be read without unpickling it.
        data: The raw elements, where the table has them: there is no record.
    """

    key: str
    box: Box
    path: AnyPath
    offset: int
    length: int
    checksum: str
    start: int = 0
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What one saving rank said of itself.

    Args:
        coordinates: Its place: tensor, pipeline, expert, data, ...
        values: Its own values, RNG states first of all.
        extra_state: FP8 scaling state of modules.
    """

    coordinates: Mapping[str, int]
    values: Any
    extra_state: Any = None


class CheckpointSource(Protocol):
    """An opened checkpoint, its structure checked."""

    @property
    def directory(self) -> AnyPath:
        """Where it lies, held on to: what takes its place meanwhile is not read."""

    @property
    def identity(self) -> str:
        """What tells this checkpoint from another: its name and its head's checksum."""

    @property
    def keys(self) -> Mapping[str, KeyEntry]:
        """Every tensor of model and optimizer."""

    @property
    def sections(self) -> tuple[Section, ...]:
        """What was saved: "model", "optimizer"."""

    @property
    def topology(self) -> Mapping[str, int | str]:
        """The saving job's sizes."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Non-tensor state."""

    @property
    def stateless(self) -> frozenset[str]:
        """Optimizer parameters that were saved without state."""

    def hyperparameters(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Saved hyperparameters of each named optimizer parameter that has some."""

    def chunks(self, keys: Iterable[str]) -> dict[str, list[StoredChunk]]:
        """Where the keys lie; every file checked to be there at its full size."""

    def read(self, chunk: StoredChunk, *, verify: bool = True, scratch: Scratch | None = None) -> torch.Tensor:
        """A chunk's elements on the host, shaped like its box; damaged bytes raise, unless they go unverified.

        They may lie in the scratch memory, and are gone when it is used again.
        """

    def verify(self, chunk: StoredChunk, scratch: Scratch) -> None:
        """Raise what `read` would, and keep nothing."""

    def check_files(self, *, content: bool, progress: Callable[[], None] = lambda: None) -> None:
        """Check the files beside payload and tables, as far as the format lists them: sizes, and content if asked."""

    def ranks(self) -> Iterator[RankRecord]:
        """The saving ranks."""
