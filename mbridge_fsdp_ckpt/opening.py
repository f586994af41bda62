# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Opening a directory, whichever format it is of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from mbridge_fsdp_ckpt.dcp.reader import DcpSource
from mbridge_fsdp_ckpt.dcp.unpickler import files_named
from mbridge_fsdp_ckpt.errors import ConfigurationError, DamagedCheckpointError, NotACheckpointError
from mbridge_fsdp_ckpt.format.kinds import DESCRIPTIONS, DirectoryKind, kind_by_names
from mbridge_fsdp_ckpt.format.names import (
    DCP_METADATA,
    FORMAT_NAME,
    INDEXES,
    MANIFEST_NAME,
    STOCK_FORMAT,
    iteration_of,
    suffix_of,
)
from mbridge_fsdp_ckpt.format.reader import SafeSource
from mbridge_fsdp_ckpt.format.source import CheckpointSource, Metadata
from mbridge_fsdp_ckpt.io.files import check_content, check_file, entries, hold, what_is_there
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.remedies import remedy

REMEDIES: dict[DirectoryKind, tuple[str, ...]] = {
    DirectoryKind.TORCH_DIST: (
        "Convert it: mbridge_fsdp_ckpt convert from-torch-dist SOURCE DESTINATION.",
        "Or load it as what it is, with {torch_dist}.",
    ),
    DirectoryKind.DCP: ("Load it with torch.distributed.checkpoint into the model that saved it, and save that here.",),
    DirectoryKind.LEGACY: ("Load it with the Megatron that wrote it, and save it in another format.",),
    DirectoryKind.VERL_SHARDS: (
        "VeRL's FSDP workers load it; python -m verl.model_merger makes a Hugging Face model of it.",
    ),
    DirectoryKind.VERL_STEP: ("Give the directory in it that has the tensors, such as actor/model/dist_ckpt.",),
    DirectoryKind.ROOT: (
        "Its tracker names no checkpoint. Give an iteration directory in it.",
        "mbridge_fsdp_ckpt repair ROOT writes the tracker anew.",
    ),
    DirectoryKind.HUGGING_FACE: (
        "Make a checkpoint of it: mbridge_fsdp_ckpt convert import --hf-model SOURCE --megatron-path DESTINATION.",
        "Or fine-tune from it with {hugging_face}.",
    ),
    DirectoryKind.OTHER: (
        "Give an iteration directory (iter_0000010) of a complete checkpoint, or its root with a tracker file.",
    ),
}
"""What can be done with a directory of each kind that this package does not load."""


def open_checkpoint(directory: AnyPath, near: Sequence[int] = (), *, plain: bool = False) -> CheckpointSource:
    """Open an iteration directory of this format, or of stock `fsdp_dtensor`.

    Args:
        directory: The directory.
        near: In a load, ranks whose index files are looked at first.
        plain: Whether a checkpoint of plain DCP is opened, too.

    Raises:
        NotACheckpointError: It is neither; the error says what it is.
        ManifestError, UnsupportedVersionError, DamagedCheckpointError: See the readers.
    """
    found = open_any(directory, near, plain=plain)
    if isinstance(found, DcpSource) and not found.is_of_model:
        raise _not_loaded(directory, found.kind)
    return found


def open_any(directory: AnyPath, near: Sequence[int] = (), *, plain: bool = False) -> SafeSource | DcpSource:
    """The same, for what looks at any checkpoint of torch's Distributed Checkpoint; `DcpSource.kind` says whose."""
    directory = hold(directory)
    if (directory / MANIFEST_NAME).exists():
        return SafeSource(directory, near)
    if not (directory / DCP_METADATA).exists():
        raise _not_loaded(directory, kind_of(directory))
    _check_written_by_stock(directory)
    return DcpSource(directory, plain=plain)


def kind_of(directory: AnyPath) -> DirectoryKind:
    """What a directory holds.

    Raises:
        ManifestError: It has a `.metadata` that cannot be read.
    """
    if (directory / MANIFEST_NAME).exists():
        return DirectoryKind.SAFE
    if (directory / DCP_METADATA).exists():
        return DcpSource(directory).kind
    return kind_by_names({path.name for path in entries(directory)}) if directory.is_dir() else DirectoryKind.OTHER


def open_safe(directory: AnyPath, *, remedy: str) -> SafeSource:
    """Open a checkpoint of this format, for what can be done with no other.

    Args:
        directory: An iteration directory.
        remedy: What to do with one of stock.

    Raises:
        ConfigurationError: It is one of stock.
        CheckpointError: As `open_checkpoint`.
    """
    found = open_checkpoint(directory)
    if not isinstance(found, SafeSource):
        raise _of_another(directory, FORMAT_NAME, STOCK_FORMAT, remedy)
    return found


def open_stock(directory: AnyPath, *, remedy: str) -> DcpSource:
    """Open a checkpoint of stock `fsdp_dtensor`, for what can be done with no other.

    Args:
        directory: An iteration directory.
        remedy: What to do with one of this format.

    Raises:
        ConfigurationError: It is one of this format.
        CheckpointError: As `open_checkpoint`.
    """
    found = open_checkpoint(directory)
    if not isinstance(found, DcpSource):
        raise _of_another(directory, STOCK_FORMAT, FORMAT_NAME, remedy)
    return found


def _of_another(directory: AnyPath, wanted: str, found: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(
        expected=f"a checkpoint in the format {wanted}",
        found=f"{directory}, which is in the format {found}",
        remedy=remedy,
    )


def _not_loaded(directory: AnyPath, kind: DirectoryKind) -> NotACheckpointError:
    """Says what the directory is, and what can be done with that."""
    there, others = what_is_there(directory), _other_iterations(directory)
    return NotACheckpointError(
        expected=f"a checkpoint in the format {FORMAT_NAME} or {STOCK_FORMAT}",
        found=f"{DESCRIPTIONS[kind]}: {there}" if kind in DESCRIPTIONS else there,
        remedy=f"Beside it are {others}." if others else remedy(*REMEDIES[kind]),
        key=str(directory),
    )


def _other_iterations(directory: AnyPath) -> str:
    """The newest iterations beside one that does not exist."""
    if directory.exists() or iteration_of(directory.name) is None or not directory.parent.is_dir():
        return ""
    try:
        names = sorted(path.name for path in entries(directory.parent) if iteration_of(path.name) is not None)
    except PermissionError:  # it is said behind the error that is being raised
        return ""
    return ", ".join(names[-5:])


def _check_written_by_stock(directory: AnyPath) -> None:
    """A lost manifest must not turn a checkpoint with checksums into one without."""
    found = sorted(path.name for path in entries(directory) if fnmatchcase(path.name, INDEXES))
    if found and all(suffix_of(name) for name in found):  # of a save by marker that died, or of ours
        named = {suffix_of(name) for name in files_named(directory)}
        found = [name for name in found if suffix_of(name) in named]
    if found:
        raise DamagedCheckpointError(
            expected=f"{MANIFEST_NAME} beside the index files {', '.join(found[:3])}",
            found="no such file",
            remedy="The save that wrote them did not end, or the manifest was deleted: use another checkpoint.",
            key=str(directory / MANIFEST_NAME),
        )


def check_other_files(metadata: Metadata, *, content: bool, progress: Callable[[], None] = lambda: None) -> None:
    """Check the files beside payload and index, as far as the format lists them.

    Args:
        metadata: Of an opened checkpoint.
        content: Whether to read them, too; else their sizes alone.
        progress: Called now and then while content is read.

    Raises:
        DamagedCheckpointError: One is missing, or not what was written.
    """
    for entry in metadata.files:
        if content:
            check_content(metadata.directory, entry, progress, MANIFEST_NAME)
        else:
            check_file(metadata.directory, entry, MANIFEST_NAME)
