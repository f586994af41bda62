"""What makes a directory a checkpoint: its head, which is written last."""

from __future__ import annotations

from mbridge_fsdp_ckpt.storage.format.names import DCP_METADATA, MANIFEST_NAME
from mbridge_fsdp_ckpt.storage.store import AnyPath

HEADS = (MANIFEST_NAME, DCP_METADATA)


def has_head(directory: AnyPath) -> bool:
    """Whether a directory has what makes it a checkpoint: our manifest or stock's metadata."""
    return any((directory / name).exists() for name in HEADS)


def has_readable_head(directory: AnyPath) -> bool:
    """The same of a directory that may be somebody else's: one that cannot be looked into is no checkpoint of ours."""
    try:
        return has_head(directory)
    except PermissionError:
        return False
