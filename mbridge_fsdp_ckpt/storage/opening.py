"""Opening a directory, whichever format it is of."""

from __future__ import annotations

from collections.abc import Callable

from mbridge_fsdp_ckpt.errors import DamagedCheckpointError, NotACheckpointError
from mbridge_fsdp_ckpt.storage.files import check_content, check_file, hold, what_is_there
from mbridge_fsdp_ckpt.storage.format.names import DCP_METADATA, MANIFEST_NAME, TABLES
from mbridge_fsdp_ckpt.storage.format.reader import SafeSource
from mbridge_fsdp_ckpt.storage.source import CheckpointSource, Head
from mbridge_fsdp_ckpt.storage.stock.reader import DcpSource
from mbridge_fsdp_ckpt.storage.store import AnyPath


def open_checkpoint(directory: AnyPath) -> CheckpointSource:
    """Open an iteration directory of this format, or of stock `fsdp_dtensor`.

    Raises:
        NotACheckpointError: It is neither.
        ManifestError, UnsupportedVersionError, DamagedCheckpointError: See the readers.
    """
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
    tables = sorted(path.name for path in directory.glob(TABLES))
    if tables:
        raise DamagedCheckpointError(
            expected=f"{MANIFEST_NAME} beside the chunk tables {', '.join(tables[:3])}",
            found="no such file",
            remedy="The save that wrote them did not end, or the manifest was deleted: use another checkpoint.",
            key=str(directory / MANIFEST_NAME),
        )


def check_other_files(head: Head, *, content: bool, progress: Callable[[], None] = lambda: None) -> None:
    """Check the files beside payload and tables, as far as the format lists them.

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
