# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The data of `manifest.json` and of an index file's header and record, as pydantic checks it.

`docs/format.md` says what the fields mean; `docs/schema/` has the JSON schemas of these classes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer

from mbridge_fsdp_ckpt.io.entries import ExtraEntry, FileEntry
from mbridge_fsdp_ckpt.plan.keys import Count, Entry, KeyEntry, Section

VERSION = (1, 0)
MAX_DIMENSIONS = 64
MAX_RECORD_BYTES = 1 << 27
MAX_SECONDS = 1e11
"""Of a UNIX time and of a phase: some three thousand years."""
MAX_PHASES = 64


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


Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False, strict=True)]
PhaseName = Annotated[str, Field(pattern="^[a-z][a-z_]{0,31}$")]
TimedPhase = tuple[PhaseName, Seconds, Seconds]
"""A phase of a rank's save: when it began, in seconds since `RankOwn.begun`, and how many it took."""


_TIMES = ("time", "begun", "phases")


class _Timed(Entry):
    """Data whose times are left out where they are not known."""

    @model_serializer(mode="wrap")
    def _without_unknown_times(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = serialize(self)
        return {name: value for name, value in written.items() if name not in _TIMES or value}


class Manifest(_Timed):
    """The metadata."""

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
    time: Seconds | None = None
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


class RankOwn(_Timed):
    """The record of a rank's own index file: values that are its own, and how long its part of the save took."""

    values: Any = None
    extra_state: Any = None
    begun: Seconds | None = None
    phases: Annotated[tuple[TimedPhase, ...], Field(max_length=MAX_PHASES)] = ()

    def without_times(self) -> RankOwn:
        """The same, for a checkpoint that another one is made of."""
        return self.model_copy(update={"begun": None, "phases": ()})
