# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a job's checkpoints cost besides payload, and in seconds: estimates, each in one place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mbridge_fsdp_ckpt.coordination.protocol import Node
from mbridge_fsdp_ckpt.format import columns
from mbridge_fsdp_ckpt.settings import Settings
from mbridge_fsdp_ckpt.tools.estimate.counted import Counts, Tally
from mbridge_fsdp_ckpt.tools.estimate.estimate import Estimate, read_over_held
from mbridge_fsdp_ckpt.tools.estimate.layout import JobLayout

MEETINGS = 2
"""Of a save, and of a load, where nothing is in dispute."""

REQUESTS = 3
"""To the rendezvous store, of one rank in one meeting."""

AROUND = 3
"""More, of one rank in one save: the meetings' number, their purpose, and that it has read the last decision."""

_TEXT_BYTES, _DIMENSIONS = 90, 2
"""Of a key or a parameter's name, and of most weights."""

_KEY_BYTES = columns.KEY.itemsize + _TEXT_BYTES
_NAME_BYTES = columns.NAME.itemsize + _TEXT_BYTES
_ROW_BYTES = columns.row_dtype(_DIMENSIONS).itemsize + columns.CHECK.itemsize // columns.BLOCK_ROWS
_NUMBER_BYTES = columns.NUMBER.itemsize
_FILE_BYTES = 1500  # header, record and param groups
GIGA = 1e9


@dataclass(frozen=True, slots=True)
class IndexBytes:
    """What the index takes on disk: what is not payload.

    Args:
        own: Of the index files that ranks write: a load in the same layout reads its own.
        directories: Of those that leaders of groups merge them into, without rows: each host reads them in another one.
        rows: Of these, the rest; a load reads those of what it needs.
    """

    own: int
    directories: int
    rows: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.own + self.directories + self.rows


def index_of(found: Estimate) -> IndexBytes:
    """Bytes of the index of an estimated job.  A block counts as one of a key of its own: of groups it is a bound."""
    tally, slots = found.tally, found.subjects[0].slots
    numbers = sum(spec.kind != "sharded" for spec in slots.values())
    held = int(tally.held_blocks.sum()) * numbers // (1 + len(slots) - numbers)  # a number by each that has a slice
    chunks, blocks, keys = (int(column.sum()) for column in (tally.chunks, tally.blocks, tally.keys))
    all_names = keys // (1 + len(slots)) if slots else 0
    files, rows = groups_of(tally.world), chunks * _ROW_BYTES
    own = rows + blocks * _KEY_BYTES + held * (_NUMBER_BYTES + _KEY_BYTES)
    own += all_names * _NAME_BYTES + tally.world * _FILE_BYTES
    merged = int(tally.numbers.sum()) * (_NUMBER_BYTES + _KEY_BYTES) + all_names * _NAME_BYTES + files * _FILE_BYTES
    return IndexBytes(own, merged + min(blocks, files * keys) * _KEY_BYTES, rows)


def groups_of(world: int) -> int:
    """Groups of ranks, whose index is merged."""
    return sum(Node(rank, world).leads for rank in range(world))


def files_of(tally: Tally) -> int:
    """Files of a checkpoint: payloads, index files of ranks and groups, manifest; DCP metadata where one is written."""
    own = int(np.count_nonzero(tally.bytes)) + tally.world + groups_of(tally.world) + 1
    has_view = Settings().writes_dcp_metadata(int(tally.chunks.sum() + tally.numbers.sum()))
    return own + 2 * has_view


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """What the machines can do, in GB a second.

    Args:
        host_write: Of one host to the storage.
        host_read: Of one host from the storage.
        storage_write: Of the storage from all hosts together.
        storage_read: Of the storage to all hosts together.
        ranks: Of one host.
    """

    host_write: float
    host_read: float
    storage_write: float
    storage_read: float
    ranks: int

    def write_seconds(self, by_rank: Counts) -> float:
        """Seconds in which ranks write so many bytes each: the slowest host's, or the storage's."""
        return self._seconds(by_rank, self.host_write, self.storage_write)

    def read_seconds(self, by_rank: Counts) -> float:
        """The same of reading."""
        return self._seconds(by_rank, self.host_read, self.storage_read)

    def _seconds(self, by_rank: Counts, host: float, storage: float) -> float:
        hosts = np.add.reduceat(by_rank, np.arange(0, len(by_rank), self.ranks))
        return max(float(hosts.max()) / host, float(hosts.sum()) / storage) / GIGA


@dataclass(frozen=True, slots=True)
class LoadElsewhere:
    """A load in another layout.

    Args:
        layout: That layout.
        read_over_held: Bytes that a rank reads over those of what it holds, of its planned ranks.
        seconds: What the load takes.
    """

    layout: JobLayout
    read_over_held: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a job's checkpoints cost.

    Args:
        rates: What the machines can do.
        files: Files of a checkpoint.
        index: Bytes of those of them that are index files.
        requests: To the rendezvous store, of all ranks in a save.
        save: Seconds of the first save.
        later_save: Seconds of a later one.
        load: Seconds of a load in the same layout.
        elsewhere: A load in another one.
    """

    rates: Bandwidths
    files: int
    index: IndexBytes
    requests: int
    save: float
    later_save: float
    load: float
    elsewhere: LoadElsewhere | None


def predict(found: Estimate, rates: Bandwidths, other: Estimate | None) -> Prediction:
    """Predict what an estimated job's checkpoints cost.

    Args:
        found: The job.
        rates: What the machines can do.
        other: A job of the same model in another layout, which loads what this one saved.
    """
    tally, (first, later), index = found.tally, found.planning, index_of(found)
    own = index.own // found.layout.world
    writing = rates.write_seconds(tally.bytes + own)
    return Prediction(
        rates=rates,
        files=files_of(tally),
        index=index,
        requests=(MEETINGS * REQUESTS + AROUND) * found.layout.world,
        save=writing + first,
        later_save=writing + later,
        load=rates.read_seconds(tally.held_bytes + own) + first,
        elsewhere=None if other is None else _elsewhere(found, rates, other, index),
    )


def _elsewhere(found: Estimate, rates: Bandwidths, other: Estimate, index: IndexBytes) -> LoadElsewhere:
    ratio, a_rank = read_over_held(found, other), index.directories
    read = (other.tally.held_bytes * ratio).astype(np.int64) + a_rank
    seconds = rates.read_seconds(read) + other.planning[0]
    return LoadElsewhere(other.layout, ratio, seconds)
