"""The data of `manifest.json` and of a chunk table's header, as pydantic checks it.

`docs/format.md` says what the fields mean; `docs/schema/` has the JSON schemas of these classes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from mbridge_fsdp_ckpt.plan.keys import Count, Entry, KeyEntry, Section
from mbridge_fsdp_ckpt.storage.entries import ExtraEntry, FileEntry

VERSION = (1, 0)


class TableEntry(FileEntry):
    """A writing rank's chunk table."""

    rank: Count


def _one_a_rank(tables: tuple[TableEntry, ...]) -> tuple[TableEntry, ...]:
    if len({entry.rank for entry in tables}) < len(tables) or len({entry.name for entry in tables}) < len(tables):
        raise ValueError("each rank must have one table of its own")
    return tables


class Manifest(Entry):
    """The head."""

    format: Literal["fsdp_dtensor_safe"]  # FORMAT_NAME, which a type cannot name
    version: tuple[Count, Count]
    writer: dict[str, str]
    topology: dict[str, Count | str]
    sections: tuple[Section, ...]
    keys: dict[str, KeyEntry]
    tables: Annotated[tuple[TableEntry, ...], AfterValidator(_one_a_rank)]
    files: tuple[ExtraEntry, ...] = ()
    values: Any
    checksum: str = ""


class ParameterGroup(Entry):
    """Hyperparameters (`values.encode`d) with the optimizer's names of the parameters they are for."""

    parameters: tuple[str, ...]
    hyperparameters: dict[str, Any]


class TableHeader(Entry):
    """First line of a chunk table: what one rank wrote, and the values that are its own."""

    rank: Count
    coordinates: dict[str, Count]
    files: tuple[FileEntry, ...]
    keys: dict[str, KeyEntry]
    parameter_groups: tuple[ParameterGroup, ...] = ()
    stateless: tuple[str, ...] = ()
    values: Any = None
    extra_state: Any = None
    chunks: Count
