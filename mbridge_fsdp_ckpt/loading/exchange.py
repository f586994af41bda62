# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Ranks that hold copies of a tensor read for each other: each its part, which it verifies and passes on.

    rank 0   read a | pass on a, get c | read b | pass on b, get d      in rounds of bounded size: one is read
    rank 1   read c | pass on c, get a | read d | pass on d, get b      while the one before is on its way

The bytes go over gloo, from host memory to host memory: that is where they are read, hashed and checked, and a wait
there can end.  (A wait of NCCL's only holds up a stream, and a collective that outlasts its group's limit ends the
process.)  The groups are the load's own: those of the job stay as they are when one breaks.

Nobody waits for ever.  A rank that cannot go on leaves: its connections close, which ends the waits of its peers, and
it brings its error to the next meeting.  They go there without one (`message`): a rank that died is missed and named.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch

from mbridge_fsdp_ckpt.coordination.connection import Store
from mbridge_fsdp_ckpt.coordination.coordination import Coordination
from mbridge_fsdp_ckpt.coordination.outcome import Outcome
from mbridge_fsdp_ckpt.errors import (
    CheckpointError,
    ErrorData,
    ExchangeError,
    PlanDisagreementError,
    RankMissingError,
    brief,
)
from mbridge_fsdp_ckpt.format.source import StoredChunk
from mbridge_fsdp_ckpt.io.checksums import digest
from mbridge_fsdp_ckpt.live.readers.protocol import Ranks
from mbridge_fsdp_ckpt.loading.connections import connected, gather
from mbridge_fsdp_ckpt.loading.opened import Opened
from mbridge_fsdp_ckpt.loading.sharing import ALIGNED, SharedBlock, Sharing, blocks, rounds
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.remedies import remedy

Read = Callable[[StoredChunk], torch.Tensor]
"""Gives a chunk's elements, until the next one is read."""

Put = Callable[[str, Box, torch.Tensor], None]
"""Takes elements of a box of a key."""

_AT_ONCE = 1 << 26
"""Bytes that all ranks of a replica group pass on in a round."""

_HEADER = ALIGNED  # bytes before a batch's blocks: their hash
_LOOK = timedelta(seconds=0.2)  # how long a wait goes on before it looks whether anybody is alive


def message[T, M](outcome: Outcome[T], announce: Callable[[ErrorData | None], M]) -> M | CheckpointError:
    """What to bring to the meeting that follows an exchange.

    A rank that lost its peers does not fail the meeting at once: one of them brings the cause, or is missing there.

    Args:
        outcome: Of the step with the exchange.
        announce: Makes the message; gets the error of who lost its peers, which the coordinator raises if all arrive.
    """
    lost = outcome.brought
    return announce(lost.to_wire()) if isinstance(lost, RankMissingError) else outcome.message(lambda _: announce(None))


def first(lost: list[ErrorData | None]) -> ErrorData | None:
    """What the first rank said that lost its peers, if one did."""
    known = [error for error in lost if error is not None]
    return min(known, key=lambda error: error["rank"] or 0) if known else None


def decide(lost: ErrorData | None) -> None:
    """Raise what a rank that lost its peers said, if nobody else knows the cause."""
    if lost is not None:
        raise CheckpointError.from_wire(lost)


class Exchange:
    """The connections of one load, with the ranks that this one reads for.

    Args:
        opened: The checkpoint.
        sharing: Who reads what.
        coordination: The load's.
    """

    def __init__(self, opened: Opened, sharing: Sharing, coordination: Coordination) -> None:
        self.sharing, self._opened, self._coordination = sharing, opened, coordination
        self._groups = [_ReplicaGroup(ranks, coordination) for ranks in sorted(sharing.groups)]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While the block runs, unless it fails: others then learn of it."""
        try:
            yield
        except BaseException:
            self.leave()
            raise

    def connect(self) -> None:
        """Meet this rank's peers, replica group after replica group, in the order that everybody has.

        Raises:
            RankMissingError: A peer does not answer.
            PlanDisagreementError: The ranks do not want the same.
        """
        if not self._groups or self._coordination.store is None:
            return
        # gloo waits in it; the meetings' own has to answer meanwhile
        with self._coordination.another_connection() as store:
            for group in self._groups:
                group.join(store)
                group.compare(self.sharing.plan(group.ranks))

    def pass_on(self, keys: Collection[str], read: Read, put: Put) -> None:
        """Read this rank's part of what is shared of these keys, pass it on, and get the others' parts.

        Args:
            keys: The keys.
            read: Returns a chunk's elements, until the next one is read.
            put: Is given a key, a box and its elements, which are gone when it returns.

        Raises:
            RankMissingError: A peer was lost.
            ExchangeError: What arrived is not what was sent.
            CheckpointError, OSError: This rank could not read.
        """
        for group in self._groups:  # by their ranks, as everybody does: there is always one that is complete
            parts = self.sharing.parts(group.ranks, keys)
            limit = _AT_ONCE // len(group.ranks)
            planned = rounds([blocks(self._opened, part, limit) for part in parts], limit)
            if planned:
                group.pass_on(planned, read, put)

    def leave(self) -> None:
        """Close all connections."""
        for group in self._groups:
            group.leave()


class _ReplicaGroup:
    """Ranks that read for each other, this one among them."""

    def __init__(self, ranks: Ranks, coordination: Coordination) -> None:
        self.ranks, self._coordination = ranks, coordination
        self._place = ranks.index(coordination.rank)
        self._group: Any = None
        self._work: Any = None

    def join(self, store: Store) -> None:
        """Connect with all peers."""
        name = f"{self._coordination.name}/group/{'-'.join(map(str, self.ranks))}"
        try:
            self._group = connected(store, name, self._place, len(self.ranks), self._coordination)
        except RuntimeError as error:
            raise self._lost(error) from error

    def compare(self, plan: str) -> None:
        """Do all want the same?"""
        own = torch.tensor([digest(plan.encode()) >> 1])
        found = [torch.empty_like(own) for _ in self.ranks]
        self._begin(own, found)
        self._finish()
        for one, other in pairwise(found):
            if not torch.equal(one, other):
                raise PlanDisagreementError(
                    expected=f"ranks {self._named()} to need the same of the checkpoint",
                    found="they do not",
                    remedy="They hold copies of the same parameters, but differ in model, optimizer or settings.",
                )

    def pass_on(self, planned: list[list[list[SharedBlock]]], read: Read, put: Put) -> None:
        """Round after round; while one is on its way, this rank reads what it passes on in the next."""
        widths = [_HEADER + max(sum(item.room for item in batch) for batch in batches) for batches in planned]
        sent = [torch.empty(max(widths), dtype=torch.uint8) for _ in range(2)]
        got = torch.empty(len(self.ranks), max(widths), dtype=torch.uint8)
        elements = _Elements(read)
        for number, (batches, width) in enumerate(zip(planned, widths, strict=True)):
            own = sent[number % 2][:width]
            self._pack(batches[self._place], own, elements)
            if number:
                self._take(planned[number - 1], got, put)
            self._begin(own, list(got[:, :width].unbind()))
        self._take(planned[-1], got, put)

    def leave(self) -> None:
        """A group is closed when nothing refers to it: where an operation is under way, that would wait for its end."""
        if self._work is not None and not self._work.is_completed():
            for never_closed in (self._group, self._work):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(never_closed))
        self._group = self._work = None

    def _pack(self, batch: list[SharedBlock], own: torch.Tensor, elements: _Elements) -> None:
        try:
            with self._coordination.at_work():
                for item, target in _places(batch, own):
                    target.copy_(elements.of(item))
                self._coordination.heartbeat()
        except BaseException:
            self._settle()
            raise
        own[:_HEADER].view(torch.int64)[0] = _hash(batch, own)

    def _take(self, batches: list[list[SharedBlock]], got: torch.Tensor, put: Put) -> None:
        self._finish()
        for rank, batch, block in zip(self.ranks, batches, got, strict=True):
            if int(block[:_HEADER].view(torch.int64)[0]) != _hash(batch, block):
                raise ExchangeError(
                    expected=f"the bytes that rank {rank} has read and verified",
                    found=f"others, of {batch[0].chunk.key if batch else 'nothing'}",
                    remedy="They changed on their way through gloo, or in a host's memory: look at its logs.",
                )
            for item, source in _places(batch, block):
                put(item.chunk.key, item.box, source)

    def _begin(self, own: torch.Tensor, everybodys: list[torch.Tensor]) -> None:
        # the last limit of all: a peer may be inside the storage for long, and gives heartbeats there
        limit = self._coordination.storage_limit + 2 * self._coordination.time_limit
        try:
            self._work = gather(self._group, own, everybodys, limit)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _finish(self) -> None:
        """Wait for the operation under way, for as long as anybody gives heartbeats."""
        watch = self._coordination.watch()
        while not self._work.is_completed():
            try:
                self._work.wait(_LOOK)
            except RuntimeError as error:  # not yet, or never
                if not self._work.is_completed() and watch.over():
                    raise self._lost(error) from error
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _settle(self) -> None:
        """Before this rank leaves with an error of its own: a group with an operation under way cannot be closed."""
        if self._work is not None:
            try:
                self._finish()
            except RankMissingError:
                return

    def _lost(self, error: RuntimeError) -> RankMissingError:
        return RankMissingError(
            expected=f"ranks {self._named()} to read for each other",
            found=brief(error),
            remedy=remedy("Look at the logs of these ranks.", "{share_reads} can let every rank read for itself."),
            rank=self._coordination.rank,
        )

    def _named(self) -> str:
        return ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")


class _Elements:
    """Elements of blocks, whose chunks are read once each."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._last: tuple[StoredChunk, torch.Tensor] | None = None

    def of(self, item: SharedBlock) -> torch.Tensor:
        if self._last is None or self._last[0] is not item.chunk:
            self._last = item.chunk, self._read(item.chunk)
        return self._last[1][item.box.slices_in(item.chunk.box)]


def _places(batch: list[SharedBlock], memory: torch.Tensor) -> Iterator[tuple[SharedBlock, torch.Tensor]]:
    at = _HEADER
    for item in batch:
        yield item, memory[at : at + item.length].view(item.dtype).view(item.box.size)
        at += item.room


def _hash(batch: list[SharedBlock], memory: torch.Tensor) -> int:
    """Of what the batch holds, as an int64."""
    held = memory[_HEADER : _HEADER + sum(item.room for item in batch)]
    return digest(held.numpy()) >> 1
