"""The data of `manifest.json` and of an index file's header and record, as pydantic checks it.

`docs/format.md` says what the fields mean; `docs/schema/` has the JSON schemas of these classes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from mbridge_fsdp_ckpt.plan.keys import Count, Entry, KeyEntry, Section
from mbridge_fsdp_ckpt.storage.entries import ExtraEntry, FileEntry

VERSION = (1, 0)
MAX_DIMENSIONS = 64
MAX_RECORD_BYTES = 1 << 27


class IndexEntry(FileEntry):
    """An index file of one rank or of a group of ranks."""

    rank: Count


def _one_a_group(index: tuple[IndexEntry, ...]) -> tuple[IndexEntry, ...]:
    if len({entry.rank for entry in index}) < len(index) or len({entry.name for entry in index}) < len(index):
        raise ValueError("each group must have one index file of its own")
    return index


Hash = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
Token = Annotated[str, Field(pattern="^[0-9a-f]{12}$")]
Suffix = Annotated[str, Field(pattern="^(-[0-9a-f]{12})?$")]
"""What the names of a save's files end with, before their extension; empty on file systems."""


class Manifest(Entry):
    """The head."""

    format: Literal["fsdp_dtensor_safe"]  # FORMAT_NAME, which a type cannot name
    version: tuple[Count, Count]
    save: Token
    suffix: Suffix = ""
    writer: dict[str, str]
    topology: dict[str, Count | str]
    sections: tuple[Section, ...]
    families: dict[str, str] = Field(default_factory=dict)
    slots: tuple[str, ...] = ()
    hyperparameters: dict[Hash, dict[str, Any]] = Field(default_factory=dict)
    keys: Count
    chunks: Count
    states: Count = 0
    index: Annotated[tuple[IndexEntry, ...], AfterValidator(_one_a_group)]
    files: tuple[ExtraEntry, ...] = ()
    values: Any
    checksum: str = ""


class IndexHeader(Entry):
    """The header of an index file: how long its arrays are, and what its keys are."""

    save: Token
    suffix: Suffix
    axes: tuple[str, ...]
    entries: tuple[KeyEntry, ...]
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS, strict=True)]
    ranks: Count
    keys: Count
    names: Count
    numbers: Count
    rows: Count
    texts: Count
    record: Annotated[int, Field(ge=0, le=MAX_RECORD_BYTES, strict=True)]
    record_checksum: Hash


class RankOwn(Entry):
    """The record of a rank's own index file: values that are its own."""

    values: Any = None
    extra_state: Any = None
