# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint counts among the newest that stay: whether all is there that its metadata names.

    read       the metadata, whole, and the head of each group's index file
    looked at  every other file that they name: whether it is there, and as long as they say

No payload is read, and the sizes come from one listing: a pruning after each save can afford that.  Bytes that were
changed in place are found by `verify` and by a load.
"""

from __future__ import annotations

from collections.abc import Iterator

from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.format.index import IndexFile
from mbridge_fsdp_ckpt.format.manifest import listed_files, read_manifest
from mbridge_fsdp_ckpt.format.names import DCP_METADATA, MANIFEST_NAME, Files
from mbridge_fsdp_ckpt.io.ranges import OpenFiles
from mbridge_fsdp_ckpt.io.store import AnyPath, store_of


def defect(directory: AnyPath) -> str:
    """Why a checkpoint with metadata cannot be read, in words; empty where nothing speaks against it.

    Raises:
        OSError: The storage refused to tell, or somebody replaces or removes it.
    """
    sizes = store_of(directory).sizes()
    named = _named_by_ours if MANIFEST_NAME in sizes else _named_by_stock
    try:
        for name, least, most in named(directory):
            size = sizes.get(name)
            if size is None:
                return f"no file {name}"
            if not least <= size <= most:
                return f"{name} has {size} bytes, not {least}"
    except CheckpointError as error:
        return f"expected {error.expected}, found {error.found}"
    return ""


_Named = Iterator[tuple[str, int, float]]
"""Names of files, each with how long it is at the least and at the most."""
_ANY = float("inf")


def _named_by_ours(directory: AnyPath) -> _Named:
    manifest = read_manifest(directory)
    files = Files(manifest.save, manifest.suffix)
    for entry in (*manifest.index, *listed_files(manifest)):
        yield entry.name, entry.size, entry.size
    for entry in manifest.index:
        for rank, size, _ in IndexFile(directory / entry.name, entry.size, files, OpenFiles()).ranks.tolist():
            yield files.of_rank(rank), 1, _ANY
            if size:
                yield files.payload(rank), size, size


def _named_by_stock(directory: AnyPath) -> _Named:
    from mbridge_fsdp_ckpt.dcp.unpickler import read_metadata  # DCP, which a checkpoint process does without

    for info in read_metadata(directory / DCP_METADATA).storage_data.values():
        yield info.relative_path, info.offset + info.length, _ANY
