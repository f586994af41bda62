# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What an index says otherwise than itself, the metadata or other index files; a load does not look at all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from mbridge_fsdp_ckpt.errors import CheckpointError, StoreClientError
from mbridge_fsdp_ckpt.format import columns
from mbridge_fsdp_ckpt.format.directory import Directory
from mbridge_fsdp_ckpt.format.group_index import merged
from mbridge_fsdp_ckpt.format.index import IndexFile
from mbridge_fsdp_ckpt.format.schema import Manifest
from mbridge_fsdp_ckpt.format.values import decode_mapping

_OWN = "what its ranks' own index files make"


def contradictions(
    group: IndexFile, manifest: Manifest, own_index: Callable[[int], IndexFile]
) -> Iterator[tuple[str, str]]:
    """What a group's index says otherwise than itself, the metadata or its ranks' own: expected and found.

    Args:
        group: The group's index.
        manifest: The metadata.
        own_index: Opens a rank's own; what it raises is no contradiction of the group's.
    """
    yield from _by_another_hash(group)
    said = set(group.names["value"][group.names["kind"] == columns.PARAMETER].tolist())
    unknown = {f"{hashed:016x}" for hashed in said} - manifest.hyperparameters.keys()
    if unknown:
        yield "hyperparameters that the metadata has", ", ".join(sorted(unknown)[:3])
    try:
        own = [own_index(rank).columns() for rank in group.ranks["rank"].tolist()]
    except (CheckpointError, OSError) as error:
        if isinstance(error, StoreClientError):
            raise
        return
    try:
        same = merged(own).to_bytes() == replace(group.columns(), record=b"").to_bytes()
    except CheckpointError as error:
        yield _OWN, f"{error.key}: {error.found}"
    else:
        if not same:
            yield _OWN, "another"


def _by_another_hash(file: IndexFile) -> Iterator[tuple[str, str]]:
    try:
        lost = file.without_its_hash()
    except CheckpointError as error:
        yield error.expected, error.found
    else:
        if lost is not None:
            yield "keys and names by their hashes", f"{lost} by another"[:500]


def unlike_copies(own: IndexFile, index: Directory) -> Iterator[tuple[str, str]]:
    """What a rank's index has twice, or has copied otherwise than the index has it: expected and found."""
    yield from _by_another_hash(own)
    entries = own.header.entries
    if len(set(entries)) < len(entries):
        yield "each description of keys once", f"{len(entries)}, of which {len(set(entries))} differ"
    sets = [set(own.names["value"][own.names["kind"] == k].tolist()) for k in (columns.PARAM_GROUP, columns.PARAMETER)]
    if sets[0] and sets[1] - sets[0]:
        yield "a param group with the hyperparameters of each parameter", f"none with {min(sets[1] - sets[0]):016x}"
    for place in np.flatnonzero(~own.are_sharded).tolist():
        key, number = own.text_of_key(place), own.number(place)
        for group, there in index.places(key):
            if group.number(there) != number:
                yield f"{group.number(there).hex()} for {key}, as {group.path.name} has it", number.hex()


def undecodable(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Values of the metadata that no load can use: expected and found."""
    for values in (manifest.values, *manifest.hyperparameters.values()):
        try:
            decode_mapping(values)
        except CheckpointError as error:
            yield error.expected, error.found
