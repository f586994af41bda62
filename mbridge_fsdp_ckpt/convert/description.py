"""What a checkpoint says besides tensors, as a rewritten one repeats it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mbridge_fsdp_ckpt.errors import ManifestError
from mbridge_fsdp_ckpt.plan.boxes import whole
from mbridge_fsdp_ckpt.plan.keys import KeyEntry, Section
from mbridge_fsdp_ckpt.plan.tiling import tiling_defect
from mbridge_fsdp_ckpt.storage.files import Json
from mbridge_fsdp_ckpt.storage.format.reader import SafeSource
from mbridge_fsdp_ckpt.storage.format.schema import ParameterGroup
from mbridge_fsdp_ckpt.storage.source import StoredChunk
from mbridge_fsdp_ckpt.versions import writer_versions

_PLACE = ("pipeline", "tensor")


@dataclass(frozen=True, slots=True)
class Record:
    """What one saving rank said of itself; values as the table has them."""

    coordinates: dict[str, int]
    values: Any = None
    extra_state: Any = None


@dataclass(frozen=True, slots=True)
class Description:
    """All of a checkpoint but its chunks.

    Args:
        keys: Every tensor.
        sections: What was saved.
        topology: The saving job's sizes.
        values: Non-tensor state, as the manifest has it.
        records: What ranks said of themselves, each with the number of the table that is to have it.
        groups: Hyperparameters, and the parameters that they are for.
        stateless: Optimizer parameters without state.
        writer: Versions of packages that wrote it.
        notes: What does not come along, in words.
    """

    keys: Mapping[str, KeyEntry]
    sections: tuple[Section, ...]
    topology: dict[str, int | str]
    values: Json
    records: Mapping[int, Record]
    groups: tuple[ParameterGroup, ...] = ()
    stateless: tuple[str, ...] = ()
    writer: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def describe(source: SafeSource) -> Description:
    """A checkpoint of this format."""
    head = source.manifest
    records, groups, stateless = {}, Groups(), dict[str, None]()
    for header in source.headers:
        records[header.rank] = Record(header.coordinates, header.values, header.extra_state)
        stateless |= dict.fromkeys(header.stateless)
        for group in header.parameter_groups:
            groups.add(group.parameters, group.hyperparameters)
    return Description(
        keys=head.keys,
        sections=head.sections,
        topology=dict(head.topology),
        values=head.values,
        records=dict(sorted(records.items())),
        groups=groups.result(),
        stateless=tuple(stateless),
        writer={**head.writer, **writer_versions(training=False)},
    )


def with_few_records(description: Description) -> Description:
    """The same with one record for each (pipeline, tensor) place, as stock keeps them, and those with FP8 state."""
    kept: list[Record] = []
    places: set[tuple[int | None, ...]] = set()
    for record in description.records.values():
        place = tuple(record.coordinates.get(axis) for axis in _PLACE)
        if place not in places or record.extra_state is not None:
            kept.append(record)
        places.add(place)
    left_out = len(description.records) - len(kept)
    if not left_out:
        return description
    note = f"the own state (random-number states) of {left_out} saving ranks is left out: one for each place is kept"
    return replace(description, records=dict(enumerate(kept)), notes=(*description.notes, note))


def covering(key: str, entry: KeyEntry, chunks: Iterable[StoredChunk]) -> list[StoredChunk]:
    """The chunks of a key that have elements, sorted by offset.

    Raises:
        ManifestError: They don't cover it, each element once.
    """
    held = sorted((chunk for chunk in chunks if chunk.box.volume), key=lambda chunk: chunk.box.offset)
    defect = tiling_defect(whole(entry.shape), (chunk.box for chunk in held))
    if defect:
        raise ManifestError(
            expected="chunks that cover the tensor once",
            found=defect,
            remedy="The checkpoint is incomplete: use another one.",
            key=key,
        )
    return held


class Groups:
    """Collects hyperparameters: parameters with the same ones become one group; the first word on a name counts."""

    def __init__(self) -> None:
        self._members: dict[str, list[str]] = {}
        self._known: set[str] = set()

    def add(self, parameters: Iterable[str], hyperparameters: Mapping[str, Any]) -> None:
        """Add parameters with their encoded hyperparameters."""
        members = self._members.setdefault(json.dumps(hyperparameters), [])
        for name in parameters:
            if name not in self._known:
                self._known.add(name)
                members.append(name)

    def result(self) -> tuple[ParameterGroup, ...]:
        """The groups that have parameters."""
        return tuple(
            ParameterGroup(parameters=tuple(members), hyperparameters=json.loads(hyperparameters))
            for hyperparameters, members in self._members.items()
            if members
        )
