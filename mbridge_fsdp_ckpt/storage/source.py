"""What a load reads from: one narrow interface over this format and stock `fsdp_dtensor`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from mbridge_fsdp_ckpt.errors import DamagedCheckpointError, NotACheckpointError
from mbridge_fsdp_ckpt.geometry import Box
from mbridge_fsdp_ckpt.storage.files import AnyPath, is_plain_file, read_bounded, what_is_there
from mbridge_fsdp_ckpt.storage.head import DCP_METADATA, has_head
from mbridge_fsdp_ckpt.storage.held import hold
from mbridge_fsdp_ckpt.storage.manifest import MANIFEST_NAME
from mbridge_fsdp_ckpt.storage.ranges import Scratch
from mbridge_fsdp_ckpt.storage.rename import recover
from mbridge_fsdp_ckpt.storage.schema import KeyEntry


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
    def sections(self) -> tuple[str, ...]:
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


TRACKER = "latest_checkpointed_iteration.txt"
TRAIN_STATE, TRAIN_STATE_TRACKER = "train_state.pt", "latest_train_state.pt"
"""Of Bridge: in an iteration directory, and a copy of the newest in the root."""

MAX_TRAIN_STATE_BYTES = 1 << 28
_MAX_TRACKER_BYTES = 1 << 12


def find_checkpoint(path: AnyPath) -> AnyPath:
    """The iteration directory: the path itself, or the one that the tracker file of a run's root names.

    If a save died between its two renames, the directory that the tracker names is moved back first.

    Raises:
        NotACheckpointError: There is neither.
        ManifestError: The tracker is no small file.
    """
    tracker = path / TRACKER
    if has_head(path) or not is_plain_file(tracker):
        return path
    named = read_bounded(tracker, _MAX_TRACKER_BYTES).decode(errors="replace").strip()[:100]
    directory = path / (f"iter_{int(named):07d}" if named.isdecimal() else named)
    known = named == "release" or named.isdecimal()
    if known and isinstance(directory, Path):
        recover(directory)
    if not known or not directory.is_dir():
        raise NotACheckpointError(
            expected=f"{TRACKER} to name an iteration directory beside it",
            found=repr(named),
            remedy="Give an iteration directory (iter_0000010).",
            key=str(tracker),
        )
    return directory


def open_checkpoint(directory: AnyPath) -> CheckpointSource:
    """Open an iteration directory of this format, or of stock `fsdp_dtensor`.

    Raises:
        NotACheckpointError: It is neither.
        ManifestError, UnsupportedVersionError, DamagedCheckpointError: See the readers.
    """
    from mbridge_fsdp_ckpt.storage.dcp_reader import DcpSource
    from mbridge_fsdp_ckpt.storage.reader import SafeSource

    directory = hold(directory)
    if (directory / MANIFEST_NAME).exists():
        return SafeSource(directory)
    if (directory / DCP_METADATA).exists():
        _check_written_by_stock(directory)
        return DcpSource(directory)
    raise NotACheckpointError(
        expected=f"{MANIFEST_NAME} or {DCP_METADATA} in the directory",
        found=what_is_there(directory),
        remedy="Give an iteration directory (iter_0000010) of a complete checkpoint, or its root with a tracker file.",
        key=str(directory),
    )


def _check_written_by_stock(directory: AnyPath) -> None:
    """A lost manifest must not turn a checkpoint with checksums into one without."""
    tables = sorted(path.name for path in directory.glob("chunks_*.jsonl"))
    if tables:
        raise DamagedCheckpointError(
            expected=f"{MANIFEST_NAME} beside the chunk tables {', '.join(tables[:3])}",
            found="no such file",
            remedy="The save that wrote them did not end, or the manifest was deleted: use another checkpoint.",
            key=str(directory / MANIFEST_NAME),
        )
