# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Writing what stock Bridge reads, and nothing of this format: payload as it is, `.metadata`, the values, run files.

Memory: one block of a file, and what `.metadata` says of all chunks, which is global by nature.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from mbridge_fsdp_ckpt.commit import removal
from mbridge_fsdp_ckpt.commit.content import Commit
from mbridge_fsdp_ckpt.commit.rename import put_in_place
from mbridge_fsdp_ckpt.dcp.writer import write_dcp_view
from mbridge_fsdp_ckpt.format.names import PROGRESS, TRAIN_STATE
from mbridge_fsdp_ckpt.format.reader import SafeSource
from mbridge_fsdp_ckpt.io.checksums import as_text
from mbridge_fsdp_ckpt.io.entries import FileEntry
from mbridge_fsdp_ckpt.io.file_system import sync_directory
from mbridge_fsdp_ckpt.io.files import check_file, copy_file, walk
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.tools.convert.description import covering

_RANDOM = "rng_state"


def payload_files(source: SafeSource) -> list[FileEntry]:
    """The payload files of a checkpoint, as its index has them."""
    ranks = [rank.tolist() for group in source.index.groups for rank in group.ranks]
    return [
        FileEntry(name=source.files.payload(rank), size=size, checksum=as_text(number))
        for rank, size, number in sorted(ranks)
        if size
    ]


def write_stock(
    commit: Commit,
    source: SafeSource,
    target: Path,
    files: Iterable[FileEntry],
    add_files: Callable[[Path], None],
    progress: Callable[[int], None],
    last_call: Callable[[], None],
) -> None:
    """Write a stock checkpoint and put it in its place.

    Args:
        commit: By rename: its staging directory is used.
        source: Where it comes from.
        target: Where it goes; nothing is there.
        files: The payload.
        add_files: Puts run files into a directory.
        progress: Gets the bytes of payload copied since its last call.
        last_call: Called just before the step that cannot be undone.

    Raises:
        DamagedCheckpointError, ManifestError: The source is damaged.  Nothing was committed.
        OSError: The storage refused.
    """
    staging = target.parent / commit.directory.name
    keys = source.metadata.keys
    chunks = source.chunks(keys)
    for key, entry in keys.items():
        covering(key, entry, chunks.pop(key))
    for file in files:
        copy_file(check_file(source.metadata.directory, file), staging / file.name, file, progress)
    add_files(staging)
    beside = (staging / TRAIN_STATE).exists()  # where stock keeps what this format has among its values
    values = {name: value for name, value in source.metadata.values.items() if name != PROGRESS or not beside}
    write_dcp_view(staging, source, values)
    _flush(staging, progress)
    last_call()
    removal.delete_later(put_in_place(staging, target))


def _flush(directory: Path, progress: Callable[[int], None]) -> None:
    for path in walk(directory):
        progress(0)
        if path.is_dir():
            sync_directory(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())


def not_in_stock(source: SafeSource) -> Iterator[str]:
    """What stock has no place for, in words."""
    kept: dict[tuple[int | None, int | None], Any] = {}
    lost, scaling, others = 0, False, set[str]()
    for _, index in source.own_indexes():
        own, coordinates = index.record(), index.coordinates_of()
        values = own.values if isinstance(own.values, dict) else {}
        random = values.get(_RANDOM)
        place = coordinates.get("pipeline"), coordinates.get("tensor")
        lost += random is not None and kept.setdefault(place, random) != random
        scaling = scaling or own.extra_state is not None
        others |= values.keys() - {_RANDOM}
    if lost:
        ranks = "1 rank" if lost == 1 else f"{lost} ranks"
        yield f"random-number states of {ranks} are left out: stock keeps one for each (pipeline, tensor) place"
    if scaling:
        yield "FP8 scaling state is left out: stock starts it afresh"
    if others:
        yield f"ranks' own values are left out: {', '.join(sorted(others))}"
    newer = [key for key, entry in source.metadata.keys.items() if _is_named_otherwise(key, entry)]
    if newer:
        yield (
            f"stock finds {len(newer)} keys of multi-token prediction or fused MLA from Megatron-Core's pull request "
            f"6271 on, not in 0.19: {', '.join(newer[:3])}"
        )


def _is_named_otherwise(key: str, entry: KeyEntry) -> bool:
    is_fused_attention = (entry.family or "").startswith("latent_attention/")
    return is_fused_attention or (".mtp.layers." in key and ".transformer_layer." in key)
