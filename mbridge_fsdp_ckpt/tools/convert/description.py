# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says besides tensors, as a rewritten one repeats it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from mbridge_fsdp_ckpt.errors import ManifestError
from mbridge_fsdp_ckpt.format.columns import STATE, STATELESS
from mbridge_fsdp_ckpt.format.reader import SafeSource
from mbridge_fsdp_ckpt.format.schema import RankOwn
from mbridge_fsdp_ckpt.format.source import StoredChunk
from mbridge_fsdp_ckpt.format.values import hash_of
from mbridge_fsdp_ckpt.io.files import Json
from mbridge_fsdp_ckpt.plan.boxes import whole
from mbridge_fsdp_ckpt.plan.keys import KeyEntry, Section
from mbridge_fsdp_ckpt.plan.tiling import tiling_defect
from mbridge_fsdp_ckpt.versions import writer_versions

_PLACE = ("pipeline", "tensor")


@dataclass(frozen=True, slots=True)
class Record:
    """What one saving rank said of itself; values as its index file has them."""

    coordinates: dict[str, int]
    own: RankOwn = field(default_factory=RankOwn)
    states: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Parameters:
    """Optimizer parameters with their hyperparameters; the first word on a name counts.

    Args:
        sets: By parameter, the checksum of its hyperparameters.
        hyperparameters: By checksum, the hyperparameters, encoded.
    """

    sets: dict[str, int] = field(default_factory=dict)
    hyperparameters: dict[int, dict[str, Json]] = field(default_factory=dict)

    def add(self, names: Iterable[str], hyperparameters: dict[str, Json]) -> None:
        """Add parameters with their encoded hyperparameters."""
        hashed = hash_of(dict(hyperparameters))
        self.hyperparameters[hashed] = hyperparameters
        for name in names:
            self.sets.setdefault(name, hashed)


@dataclass(frozen=True, slots=True)
class Description:
    """All of a checkpoint but its chunks.

    Args:
        keys: Every tensor.
        sections: What was saved.
        topology: The saving job's sizes.
        values: Non-tensor state, as the manifest has it.
        records: What ranks said of themselves, each with the number of the rank that is to have it.
        parameters: Optimizer parameters, and their hyperparameters.
        stateless: Optimizer parameters without state.
        writer: Versions of packages that wrote it.
        notes: What does not come along, in words.
    """

    keys: Mapping[str, KeyEntry]
    sections: tuple[Section, ...]
    topology: dict[str, int | str]
    values: Json
    records: Mapping[int, Record]
    parameters: Parameters = field(default_factory=Parameters)
    stateless: tuple[str, ...] = ()
    writer: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def describe(source: SafeSource) -> Description:
    """A checkpoint of this format."""
    metadata, stateless = source.manifest, dict[str, None]()
    records: dict[int, Record] = {}
    for rank, index in source.own_indexes():
        places = index.names["kind"] == STATELESS
        stateless |= dict.fromkeys(index.text_of_name(int(place)) for place in np.flatnonzero(places))
        states = tuple(index.text_of_name(int(place)) for place in np.flatnonzero(index.names["kind"] == STATE))
        records[rank] = Record(index.coordinates_of(), index.record().without_times(), states)
    return Description(
        keys=source.metadata.keys,
        sections=metadata.sections,
        topology=dict(metadata.topology),
        values=metadata.values,
        records=records,
        parameters=Parameters(
            source.parameters(), {int(h, 16): values for h, values in metadata.hyperparameters.items()}
        ),
        stateless=tuple(stateless),
        writer={**metadata.writer, **writer_versions(training=False)},
    )


def with_few_records(description: Description) -> Description:
    """The same with one record for each (pipeline, tensor) place, as stock keeps them, and those with FP8 state."""
    kept: list[Record] = []
    places: set[tuple[int | None, ...]] = set()
    for record in description.records.values():
        place = tuple(record.coordinates.get(axis) for axis in _PLACE)
        if place not in places or record.own.extra_state is not None:
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
