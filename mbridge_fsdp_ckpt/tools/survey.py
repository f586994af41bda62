# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What `inspect` knows of a checkpoint: read from its metadata and its index, file by file, never from payload."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mbridge_fsdp_ckpt.format.columns import box_of
from mbridge_fsdp_ckpt.format.names import (
    DCP_METADATA,
    FORMAT_NAME,
    MANIFEST_NAME,
    rank_of_payload,
)
from mbridge_fsdp_ckpt.format.reader import SafeSource
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.opening import open_any, open_checkpoint
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.keys import MODEL_PREFIX, KeyEntry, Section
from mbridge_fsdp_ckpt.tools.balance import Balance, RankShare, balance

Visit = Callable[[str, int, Box], None]
"""Called with each chunk's key, the rank that wrote it (-1: unknown), and its block."""


@dataclass(slots=True)
class Survey:
    """A checkpoint at a glance.

    Args:
        directory: Where it is.
        format: `fsdp_dtensor_safe`, stock's `fsdp_dtensor`, or another of torch's; see `DirectoryKind`.
        version: Of the format; empty for stock.
        writer: Package versions of the job that saved.
        topology: Its sizes.
        sections: "model", "optimizer".
        keys: Every tensor.
        stock_view: Whether stock can read it.
        ranks: Each writing rank's share; of stock's, as far as file names tell.
    """

    directory: str
    format: str
    version: tuple[int, ...]
    writer: dict[str, str]
    topology: dict[str, int | str]
    sections: tuple[Section, ...]
    keys: dict[str, KeyEntry]
    stock_view: bool
    ranks: dict[int, RankShare] = field(default_factory=dict)

    @property
    def families(self) -> dict[str, int]:
        """Keys that each family split."""
        return dict(sorted(Counter(entry.family for entry in self.keys.values() if entry.family).items()))

    @property
    def balance(self) -> Balance:
        """How evenly the ranks share the bytes."""
        return balance(self.ranks)

    def section_bytes(self, section: str) -> int:
        """Bytes of elements in a section."""
        return sum(entry.nbytes for key, entry in self.keys.items() if key.startswith(f"{section}."))

    def section_keys(self, section: str) -> int:
        """Keys in a section."""
        return sum(key.startswith(f"{section}.") for key in self.keys)


def survey(directory: AnyPath) -> Survey:
    """The metadata of a checkpoint; `visit_chunks` fills in the ranks.

    Raises:
        CheckpointError: It cannot be opened.
    """
    stock_view = (directory / DCP_METADATA).exists()
    if (directory / MANIFEST_NAME).exists():
        source = SafeSource(directory)
        metadata = source.manifest
        return Survey(
            directory=str(directory),
            format=FORMAT_NAME,
            version=metadata.version,
            writer=dict(metadata.writer),
            topology=dict(metadata.topology),
            sections=metadata.sections,
            keys=dict(source.metadata.keys),
            stock_view=stock_view,
        )
    stock = open_any(directory).metadata
    return Survey(str(directory), stock.format, (), {}, {}, stock.sections, dict(stock.keys), stock_view)


def visit_chunks(directory: AnyPath, found: Survey, visit: Visit = lambda key, rank, box: None) -> None:
    """Read the whole index, one file at a time; fills in the survey's ranks.

    Raises:
        CheckpointError: It is damaged.
    """
    chunks = _safe_chunks if found.format == FORMAT_NAME else _stock_chunks
    files: dict[int, set[str]] = {}
    for key, rank, box, name in chunks(directory, found):
        share = found.ranks.setdefault(rank, RankShare())
        share.bytes += found.keys[key].bytes_of(box.volume)
        share.chunks += 1
        files.setdefault(rank, set()).update([name] if name else [])
        visit(key, rank, box)
    for rank, names in files.items():
        found.ranks[rank].files = len(names)
    found.ranks = dict(sorted(found.ranks.items()))


def _safe_chunks(directory: AnyPath, found: Survey) -> Iterator[tuple[str, int, Box, str]]:
    source = SafeSource(directory)
    for group in source.index_files():
        ranks = group.ranks["rank"].tolist()
        for rank in ranks:
            found.ranks.setdefault(rank, RankShare())
        for place, rows in group.sharded_rows():
            key, dimensions = group.text_of_key(place), len(group.entry(place).shape)
            for row in rows:
                yield key, ranks[row["rank"]], box_of(row, dimensions), source.files.payload(ranks[row["rank"]])
        for place, rank, _ in group.all_numbers():
            yield group.text_of_key(place), ranks[rank], Box((), ()), ""


def _stock_chunks(directory: AnyPath, found: Survey) -> Iterator[tuple[str, int, Box, str]]:
    source = open_any(directory)
    for key in found.keys:
        for chunk in source.chunks([key])[key]:
            yield key, rank_of_payload(chunk.path.name, unknown=-1), chunk.box, chunk.path.name


def families_of(directory: AnyPath) -> dict[str, dict[str, list[str]]]:
    """For each family, its parameters with their components; parameters that are whole count for none.

    Raises:
        CheckpointError: The checkpoint cannot be opened.
    """
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for key, entry in open_checkpoint(directory).metadata.keys.items():
        if entry.family is not None and key.startswith(MODEL_PREFIX):
            parameter = re.sub(rf"[._]{re.escape(entry.component)}$", "", key.removeprefix(MODEL_PREFIX))
            found[entry.family][parameter].append(entry.component)
    return {family: dict(parameters) for family, parameters in sorted(found.items())}
