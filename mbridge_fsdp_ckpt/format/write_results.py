# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What groups of ranks tell of what they wrote, on the way to the metadata."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

from mbridge_fsdp_ckpt.errors import PlanDisagreementError, UnsupportedStateError
from mbridge_fsdp_ckpt.format.columns import Columns
from mbridge_fsdp_ckpt.format.directory import Directory
from mbridge_fsdp_ckpt.format.group_index import merged
from mbridge_fsdp_ckpt.format.index import IndexFile
from mbridge_fsdp_ckpt.format.names import Files
from mbridge_fsdp_ckpt.format.own_index import RankIndex, own_index
from mbridge_fsdp_ckpt.format.rows import Row, Scalar
from mbridge_fsdp_ckpt.format.schema import IndexEntry
from mbridge_fsdp_ckpt.io.checksums import checksum
from mbridge_fsdp_ckpt.io.entries import FileEntry
from mbridge_fsdp_ckpt.io.files import Json, check_file, write_file
from mbridge_fsdp_ckpt.io.ranges import OpenFiles
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.plan.keys import KeyEntry, name_and_slot

MAX_SETS = 1000
"""Distinct sets of hyperparameters in a checkpoint: they stand in its metadata, which everybody reads."""


class WriteResult(TypedDict):
    """Bounded, JSON-able, and the same for one rank and for many.

    Args:
        pending: Index files of ranks that are not merged into a group's yet.
        index: Index files of groups.
        chunks: Rows and numbers.
        bytes: Bytes of payload files.
        states: Modules with FP8 state, each counted by every rank that has some.
        families: Families that split keys, as name/version, each with the first of these keys.
        slots: Names of the optimizer's slots.
        hyperparameters: Each set once, encoded, by its checksum.
    """

    pending: list[dict[str, str | int]]
    index: list[dict[str, str | int]]
    chunks: int
    bytes: int
    states: int
    families: dict[str, str]
    slots: list[str]
    hyperparameters: dict[str, dict[str, Json]]


def write_own_index(
    directory: AnyPath,
    files: Files,
    said: RankIndex,
    rows: Sequence[Row],
    hyperparameters: Mapping[int, dict[str, Json]],
) -> WriteResult:
    """Write a rank's index file; returns what to tell of it.

    Raises:
        OSError: The storage refused.
    """
    name, data = files.of_rank(said.rank), own_index(said, rows, files).to_bytes()
    write_file(directory / name, data)
    entry = IndexEntry(rank=said.rank, name=name, size=len(data), checksum=checksum(data))
    slots = {named[1] for key in said.keys if (named := name_and_slot(key))}
    return {
        "pending": [entry.model_dump()],
        "index": [],
        "chunks": sum(not isinstance(row, Scalar) or row.counts for row in rows),
        "bytes": said.payload.size if said.payload is not None else 0,
        "states": len(said.states),
        "families": families_of(said.keys),
        "slots": sorted(slots),
        "hyperparameters": {f"{hashed:016x}": values for hashed, values in hyperparameters.items()},
    }


def families_of(keys: Mapping[str, KeyEntry]) -> dict[str, str]:
    """The families that split keys, each with the first of them."""
    found: dict[str, str] = {}
    for key, entry in keys.items():
        if entry.family is not None:
            found[entry.family] = min(key, found.get(entry.family, key))
    return found


def together(result: Iterable[WriteResult]) -> WriteResult:
    """The write results of several, as one.

    Raises:
        UnsupportedStateError: There are too many sets of hyperparameters.
    """
    total: WriteResult = {
        "pending": [], "index": [], "chunks": 0, "bytes": 0, "states": 0, "families": {}, "slots": [],
        "hyperparameters": {},
    }  # fmt: skip
    for one in result:
        total["pending"] += one["pending"]
        total["index"] += one["index"]
        total["chunks"] += one["chunks"]
        total["bytes"] += one["bytes"]
        total["states"] += one["states"]
        total["slots"] = sorted({*total["slots"], *one["slots"]})
        total["hyperparameters"] |= one["hyperparameters"]
        for family, key in one["families"].items():
            total["families"][family] = min(key, total["families"].get(family, key))
    if len(total["hyperparameters"]) > MAX_SETS:
        raise UnsupportedStateError(
            expected=f"at most {MAX_SETS} different sets of hyperparameters over all param groups",
            found=str(len(total["hyperparameters"])),
            remedy="Does something put a tensor, or a number of each step, into a param group? Nothing was committed.",
        )
    return total


def write_group_index(directory: AnyPath, files: Files, leader: int, result: WriteResult) -> WriteResult:
    """Merge the index files that are pending into one, the group's.

    Raises:
        PlanDisagreementError: Ranks describe a key differently, or both hold its first element.
        DamagedCheckpointError: A rank's payload is not there as it said.
        OSError: The storage refused.
    """
    pending = [IndexEntry.model_validate(entry) for entry in result["pending"]]
    parts = [_part(directory, files, entry) for entry in sorted(pending, key=lambda entry: entry.rank)]
    name, data = files.of_group(leader), merged(parts).to_bytes()
    write_file(directory / name, data)
    entry = IndexEntry(rank=leader, name=name, size=len(data), checksum=checksum(data))
    return {**result, "pending": [], "index": [*result["index"], entry.model_dump()]}


def _part(directory: AnyPath, files: Files, entry: IndexEntry) -> Columns:
    """A rank's index, whose payload is there at its size."""
    path = check_file(directory, entry)
    part = IndexFile(path, entry.size, files, OpenFiles()).columns()
    size = int(part.ranks["size"][0])
    if size:
        check_file(directory, FileEntry(name=files.payload(entry.rank), size=size, checksum=""), path.name)
    return part


def count_keys(directory: AnyPath, files: Files, result: WriteResult) -> int:
    """How many keys all groups have.

    Raises:
        PlanDisagreementError: Of one, not exactly one rank has written the first element.
        DamagedCheckpointError, ManifestError: A group's index is not what its leader reported.
    """
    entries = [IndexEntry.model_validate(entry) for entry in result["index"]]
    opened = OpenFiles()
    index = Directory([IndexFile(check_file(directory, entry), entry.size, files, opened) for entry in entries])
    for key, writers in index.without_one_origin():
        raise PlanDisagreementError(
            expected="one rank to write the first element of a tensor",
            found=f"{writers} ranks that wrote it",
            remedy="The ranks hold different models, or do not know of each other. Nothing was committed.",
            key=key,
        )
    return index.count
