# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What makes a directory a checkpoint: its metadata, which is written last."""

from __future__ import annotations

from mbridge_fsdp_ckpt.format.names import DCP_METADATA, MANIFEST_NAME
from mbridge_fsdp_ckpt.io.store import AnyPath

HEADS = (MANIFEST_NAME, DCP_METADATA)


def metadata_of(directory: AnyPath) -> AnyPath | None:
    """The file that makes a directory a checkpoint: our manifest, else stock's metadata; None where none is."""
    return next((path for name in HEADS if (path := directory / name).exists()), None)


def has_metadata(directory: AnyPath) -> bool:
    """Whether a directory has what makes it a checkpoint."""
    return metadata_of(directory) is not None


def has_readable_metadata(directory: AnyPath) -> bool:
    """The same of a directory that may be somebody else's: one that cannot be looked into is no checkpoint of ours."""
    try:
        return has_metadata(directory)
    except PermissionError:
        return False
