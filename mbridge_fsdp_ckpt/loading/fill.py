# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Reading a checkpoint's bytes: first into memory that is not live, then into live tensors."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from mbridge_fsdp_ckpt.coordination.coordination import Coordination
from mbridge_fsdp_ckpt.errors import InternalError
from mbridge_fsdp_ckpt.format.source import StoredChunk
from mbridge_fsdp_ckpt.io.progress import Progress
from mbridge_fsdp_ckpt.io.ranges import Arena, Scratch
from mbridge_fsdp_ckpt.live.tensors import local_shard, storage_of
from mbridge_fsdp_ckpt.loading import aliases, state
from mbridge_fsdp_ckpt.loading.destinations import Targets, add_targets, refuse_copy
from mbridge_fsdp_ckpt.loading.exchange import Exchange
from mbridge_fsdp_ckpt.loading.match import in_file_order
from mbridge_fsdp_ckpt.loading.opened import Opened
from mbridge_fsdp_ckpt.loading.sharing import Sharing
from mbridge_fsdp_ckpt.loading.state import Allocated
from mbridge_fsdp_ckpt.phases import Phases
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name


@dataclass(frozen=True, slots=True)
class Staged:
    """The memory that a load fills, and what it has read so far.

    Args:
        opened: The checkpoint.
        weights: Where weights go: live memory.
        slots: Where optimizer state goes: new memory, not in place yet.
        allocated: The new memory, for each parameter.
        exchange: The connections with ranks that hold copies, and read for each other.
        scratch: Memory for one read after another.
        phases: The load's clock.
        progress: Receives the progress of the load.
        kept: Verified chunks of weights, which are not read again.
    """

    opened: Opened
    weights: Targets
    slots: Targets
    allocated: list[Allocated]
    exchange: Exchange
    scratch: Scratch
    phases: Phases
    progress: Progress
    kept: dict[StoredChunk, torch.Tensor] = field(default_factory=dict)

    def take(self, chunk: StoredChunk) -> torch.Tensor:
        """A chunk's elements: kept since it was verified, or read again."""
        kept = self.kept.pop(chunk, None)
        return self.read(chunk) if kept is None else kept

    def not_kept(self, chunks: list[StoredChunk]) -> list[StoredChunk]:
        """The chunks that have to be read again."""
        return [chunk for chunk in chunks if chunk not in self.kept]

    def read(self, chunk: StoredChunk) -> torch.Tensor:
        """A chunk's elements, which are valid until the next chunk is read."""
        return self.opened.source.read(chunk, verify=self.opened.verified, scratch=self.scratch)

    def read_for_all(self, chunk: StoredChunk) -> torch.Tensor:
        """The elements of a chunk that this rank reads for others; counts them as progress."""
        elements = self.read(chunk)
        self.progress.advance(chunk.record.length)
        return elements


def prepare(opened: Opened, coordination: Coordination, *, shared: bool, phases: Phases, progress: Progress) -> Staged:
    """Find or allocate the memory to fill.  Where several keys fill the same memory, compare their values.

    Args:
        opened: The checkpoint.
        coordination: The coordination of the load.
        shared: Whether ranks read for each other.
        phases: The load's clock.
        progress: Receives the progress of the load.

    Raises:
        UnsupportedStateError: Live memory cannot be filled.
        KeyMismatchError: The values of keys that fill the same memory differ.
    """
    weights: Targets = defaultdict(list)
    held = {storage_of(buffer) for buffer in opened.reader.module.buffers()}
    for item in opened.planned:
        if item.is_buffer:
            refuse_copy(item.tensor, held, item.plan.layout.key)
        add_targets(weights, item.plan, item.plan.model_key, local_shard(item.tensor), opened.asked)
    aliases.refuse_conflicts(weights, opened, coordination)
    slots: Targets = defaultdict(list)
    allocated = list(state.allocate(opened, slots)) if opened.with_state else []
    exchange = Exchange(opened, Sharing(opened, coordination.rank, shared=shared), coordination)
    return Staged(opened, weights, slots, allocated, exchange, Scratch(coordination.heartbeat), phases, progress)


def stage(staged: Staged, budget: int, coordination: Coordination) -> int:
    """Read and verify what this rank needs, or reads for others, and change nothing.

    Optimizer state goes straight into new slots.  Of the weights, whose memory is live, the first `budget` bytes are
    kept; without verification they are not read here.

    Returns:
        Bytes of payload that this rank reads, here or, of weights, when it fills; each counted once.

    Raises:
        ConfigurationError: Parameters that share a step counter were saved after different numbers of steps.
        CheckpointError, OSError: Bytes are damaged, or cannot be read.
    """
    opened, sharing, phases = staged.opened, staged.exchange.sharing, staged.phases
    filling, shared, own = _Filling(opened, staged.slots), sharing.own(staged.slots), _own(staged)
    chunks = own if opened.verified else [chunk for chunk in own if chunk.key not in staged.weights]
    staged.progress.begin("reading", _size((*chunks, *shared)))
    arena = Arena(coordination.heartbeat)
    with staged.exchange.kept():
        with phases("exchange"):
            staged.exchange.connect()
        with phases("read"), coordination.at_work(), opened.source.reading_ahead(chunks):
            for chunk in chunks:
                if chunk.key not in staged.weights:
                    filling.read(chunk, staged)
                elif chunk.record.length <= budget:
                    budget -= chunk.record.length
                    staged.kept[chunk] = opened.source.read(chunk, scratch=arena)
                else:
                    opened.source.verify(chunk, staged.scratch)
                staged.progress.advance(chunk.record.length)
                coordination.heartbeat()
        with phases("exchange"), opened.source.reading_ahead(shared):
            staged.exchange.pass_on(staged.slots, staged.read_for_all, filling.copy)
        filling.finish()
    state.check_counters(opened, staged.allocated)
    return _size((*own, *shared))


def _own(staged: Staged) -> list[StoredChunk]:
    """The chunks that this rank reads: weights, also those that it reads for others, and state that is not shared."""
    opened, sharing = staged.opened, staged.exchange.sharing
    weights = set(sharing.own(staged.weights))
    wanted = in_file_order(opened.chunks, opened.needed)
    return [chunk for chunk in wanted if chunk in weights or not sharing.is_shared(chunk)]


def _size(chunks: Iterable[StoredChunk]) -> int:
    return sum(chunk.record.length for chunk in chunks)


def fill(staged: Staged, coordination: Coordination) -> None:
    """Copy verified bytes into live weights.

    Raises:
        CheckpointError, OSError: The storage failed after verification, or a rank was lost that reads for this one.
    """
    opened, sharing, phases = staged.opened, staged.exchange.sharing, staged.phases
    filling = _Filling(opened, staged.weights)
    needed = {key: boxes for key, boxes in opened.needed.items() if key in staged.weights}
    chunks = [chunk for chunk in in_file_order(opened.chunks, needed) if not sharing.is_shared(chunk)]
    with staged.exchange.kept():
        staged.progress.begin("filling", _size(chunks))
        with phases("fill"), coordination.at_work(), opened.source.reading_ahead(staged.not_kept(chunks)):
            for chunk in chunks:
                filling.copy(chunk.key, chunk.box, staged.take(chunk))
                staged.progress.advance(chunk.record.length)
                coordination.heartbeat()
        with phases("exchange"), opened.source.reading_ahead(staged.not_kept(sharing.own(staged.weights))):
            staged.exchange.pass_on(staged.weights, staged.take, filling.copy)
    filling.finish()


def finish(staged: Staged) -> None:
    """Put optimizer state and scaling state in place."""
    with torch.no_grad():
        state.install(staged.opened, staged.allocated)
    for restoration in staged.opened.scaling:
        restoration.apply()


class _Filling:
    """Copies chunks to their destinations, and counts the elements that each has got."""

    def __init__(self, opened: Opened, targets: Targets) -> None:
        self._opened, self._targets = opened, targets
        self._filled: Counter[tuple[str, int]] = Counter()

    def read(self, chunk: StoredChunk, staged: Staged) -> None:
        """Read a chunk, straight into its destination if that is one contiguous run of memory."""
        source, places = self._opened.source, self._targets[chunk.key]
        wanted = [number for number, each in enumerate(places) if chunk.box.intersect(each.box) is not None]
        dtype = dtype_from_name(source.metadata.keys[chunk.key].dtype)
        place = places[wanted[0]].place_in(chunk.box, dtype) if len(wanted) == 1 and chunk.record.length else None
        if place is None:  # some rows at a time, while the processor's cache has them
            for box, data in source.read_rows(chunk, staged.scratch, verify=self._opened.verified):
                self.copy(chunk.key, box, data)
            return
        source.read_part(chunk, place, staged.scratch, verify=self._opened.verified)
        self._filled[chunk.key, wanted[0]] += place.memory.size // dtype.itemsize

    def copy(self, key: str, box: Box, data: torch.Tensor) -> None:
        """Copy a block of a key into each destination of the key that overlaps it."""
        with torch.no_grad():
            for number, destination in enumerate(self._targets.get(key, ())):
                self._filled[key, number] += destination.take(box, data)

    def finish(self) -> None:
        """Check that every destination got all elements that the checkpoint has of it.

        Raises:
            InternalError: Some elements were not filled.
        """
        for key, places in self._targets.items():
            for number, destination in enumerate(places):
                common = self._opened.covered(key, destination.box)
                wanted = 0 if common is None else common.volume
                if self._filled[key, number] != wanted:
                    raise InternalError(
                        expected=f"{wanted} elements of {common} to be filled",
                        found=f"{self._filled[key, number]} elements filled",
                        remedy="Report it with the layouts of the save and of this job.",
                        key=key,
                    )
