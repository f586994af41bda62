"""Opening a directory, whichever format it is of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from mbridge_fsdp_ckpt.errors import ConfigurationError, DamagedCheckpointError, NotACheckpointError
from mbridge_fsdp_ckpt.storage.files import check_content, check_file, entries, hold, what_is_there
from mbridge_fsdp_ckpt.storage.format.names import DCP_METADATA, FORMAT_NAME, INDEXES, MANIFEST_NAME, STOCK_FORMAT
from mbridge_fsdp_ckpt.storage.format.reader import SafeSource
from mbridge_fsdp_ckpt.storage.source import CheckpointSource, Head
from mbridge_fsdp_ckpt.storage.stock.reader import DcpSource
from mbridge_fsdp_ckpt.storage.store import AnyPath


def open_checkpoint(directory: AnyPath, near: Sequence[int] = ()) -> CheckpointSource:
    """Open an iteration directory of this format, or of stock `fsdp_dtensor`.

    Args:
        directory: The directory.
        near: See `SafeSource`.

    Raises:
        NotACheckpointError: It is neither.
        ManifestError, UnsupportedVersionError, DamagedCheckpointError: See the readers.
    """
    directory = hold(directory)
    return SafeSource(directory, near) if _format_of(directory) == FORMAT_NAME else DcpSource(directory)


def open_safe(directory: AnyPath, *, remedy: str) -> SafeSource:
    """Open a checkpoint of this format, for what can be done with no other.

    Args:
        directory: An iteration directory.
        remedy: What to do with one of stock.

    Raises:
        ConfigurationError: It is one of stock.
        CheckpointError: As `open_checkpoint`.
    """
    directory = hold(directory)
    _refuse_other(directory, FORMAT_NAME, remedy)
    return SafeSource(directory)


def open_stock(directory: AnyPath, *, remedy: str) -> DcpSource:
    """Open a checkpoint of stock `fsdp_dtensor`, for what can be done with no other.

    Args:
        directory: An iteration directory.
        remedy: What to do with one of this format.

    Raises:
        ConfigurationError: It is one of this format.
        CheckpointError: As `open_checkpoint`.
    """
    directory = hold(directory)
    _refuse_other(directory, STOCK_FORMAT, remedy)
    return DcpSource(directory)


def _refuse_other(directory: AnyPath, wanted: str, remedy: str) -> None:
    found = _format_of(directory)
    if found != wanted:
        raise ConfigurationError(
            expected=f"a checkpoint in the format {wanted}",
            found=f"{directory}, which is in the format {found}",
            remedy=remedy,
        )


def _format_of(directory: AnyPath) -> str:
    if (directory / MANIFEST_NAME).exists():
        return FORMAT_NAME
    if (directory / DCP_METADATA).exists():
        _check_written_by_stock(directory)
        return STOCK_FORMAT
    raise NotACheckpointError(
        expected=f"{MANIFEST_NAME} or {DCP_METADATA} in the directory",
        found=what_is_there(directory),
        remedy="Give an iteration directory (iter_0000010) of a complete checkpoint, or its root with a tracker file.",
        key=str(directory),
    )


def _check_written_by_stock(directory: AnyPath) -> None:
    """A lost manifest must not turn a checkpoint with checksums into one without."""
    found = sorted(path.name for path in entries(directory) if fnmatchcase(path.name, INDEXES))
    if found:
        raise DamagedCheckpointError(
            expected=f"{MANIFEST_NAME} beside the index files {', '.join(found[:3])}",
            found="no such file",
            remedy="The save that wrote them did not end, or the manifest was deleted: use another checkpoint.",
            key=str(directory / MANIFEST_NAME),
        )


def check_other_files(head: Head, *, content: bool, progress: Callable[[], None] = lambda: None) -> None:
    """Check the files beside payload and index, as far as the format lists them.

    Args:
        head: Of an opened checkpoint.
        content: Whether to read them, too; else their sizes alone.
        progress: Called now and then while content is read.

    Raises:
        DamagedCheckpointError: One is missing, or not what was written.
    """
    for entry in head.files:
        if content:
            check_content(head.directory, entry, progress, MANIFEST_NAME)
        else:
            check_file(head.directory, entry, MANIFEST_NAME)
