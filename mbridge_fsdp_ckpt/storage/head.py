"""What makes a directory a checkpoint: its head, which is written last."""

from __future__ import annotations

from mbridge_fsdp_ckpt.storage.files import AnyPath
from mbridge_fsdp_ckpt.storage.manifest import MANIFEST_NAME

DCP_METADATA = ".metadata"
"""Stock's head of a checkpoint; ours may have one beside its own, for stock to read."""


def has_head(directory: AnyPath) -> bool:
    """Whether a directory has what makes it a checkpoint: our manifest or stock's metadata."""
    return any((directory / name).exists() for name in (MANIFEST_NAME, DCP_METADATA))


def has_readable_head(directory: AnyPath) -> bool:
    """The same of a directory that may be somebody else's: one that cannot be looked into is no checkpoint of ours."""
    try:
        return has_head(directory)
    except PermissionError:
        return False
