# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Ranks that hold copies of a tensor read for each other: each reads and verifies a part, and passes it on.

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
from mbridge_fsdp_ckpt.coverage.buckets import ranks_listed
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
"""Takes a chunk and returns its elements, which are valid until the next chunk is read."""

Put = Callable[[str, Box, torch.Tensor], None]
"""Takes a key, a box of it and the elements of the box."""

_AT_ONCE = 1 << 26
"""Bytes that all ranks of a replica group pass on in a round."""

_HEADER = ALIGNED  # bytes before a batch's blocks: their hash
_LOOK = timedelta(seconds=0.2)  # how long a wait lasts before it looks for heartbeats


def message[T, M](outcome: Outcome[T], announce: Callable[[ErrorData | None], M]) -> M | CheckpointError:
    """The message or error that this rank brings to the meeting that follows an exchange.

    A rank that lost its peers does not fail the meeting at once: one of them brings the cause, or is missing there.

    Args:
        outcome: The outcome of the step that exchanged.
        announce: Makes the message.  It is given this rank's error if the rank lost its peers, else None; the
            coordinator raises that error if all ranks arrive.
    """
    lost = outcome.brought
    return announce(lost.to_wire()) if isinstance(lost, RankMissingError) else outcome.message(lambda _: announce(None))


def first(lost: list[ErrorData | None]) -> ErrorData | None:
    """The error of the lowest rank that lost its peers; None where no rank did."""
    known = [error for error in lost if error is not None]
    return min(known, key=lambda error: error["rank"] or 0) if known else None


def decide(lost: ErrorData | None) -> None:
    """Raise the error of a rank that lost its peers, on the coordinator, once all ranks arrived without a cause."""
    if lost is not None:
        raise CheckpointError.from_wire(lost)


class Exchange:
    """The connections of one load to the ranks that this rank reads for.

    Args:
        opened: The checkpoint.
        sharing: Which rank reads which chunks.
        coordination: The coordination of the load.
    """

    def __init__(self, opened: Opened, sharing: Sharing, coordination: Coordination) -> None:
        self.sharing, self._opened, self._coordination = sharing, opened, coordination
        self._groups = [_ReplicaGroup(ranks, coordination) for ranks in sorted(sharing.groups)]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Close all connections if the block fails, so that the peers stop waiting."""
        try:
            yield
        except BaseException:
            self.leave()
            raise

    def connect(self) -> None:
        """Connect with this rank's peers, one replica group after the other, in the same order on all ranks.

        Raises:
            RankMissingError: A peer does not answer.
            PlanDisagreementError: The ranks of a group need different parts of the checkpoint.
        """
        if not self._groups or self._coordination.store is None:
            return
        # gloo waits in it; the meetings' own has to answer meanwhile
        with self._coordination.another_connection() as store:
            for group in self._groups:
                group.join(store)
                group.compare(self.sharing.plan(group.ranks))

    def pass_on(self, keys: Collection[str], read: Read, put: Put) -> None:
        """Read this rank's part of the shared chunks of some keys, pass it on, and receive the other ranks' parts.

        Args:
            keys: The keys.
            read: Takes a chunk and returns its elements, which are valid until the next chunk is read.
            put: Called with a key, a box and its elements, which are valid until it returns.

        Raises:
            RankMissingError: A peer was lost.
            ExchangeError: The bytes that arrived differ from those that were sent.
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
        """Check that all ranks of the group need the same parts of the checkpoint."""
        own = torch.tensor([digest(plan.encode()) >> 1])
        found = [torch.empty_like(own) for _ in self.ranks]
        self._begin(own, found)
        self._finish()
        for one, other in pairwise(found):
            if not torch.equal(one, other):
                raise PlanDisagreementError(
                    expected=f"ranks {ranks_listed(self.ranks)} to need the same of the checkpoint",
                    found="ranks that need different parts of it",
                    remedy="They hold copies of the same parameters, but differ in model, optimizer or settings.",
                )

    def pass_on(self, planned: list[list[list[SharedBlock]]], read: Read, put: Put) -> None:
        """Pass on blocks round by round.  While a round is on its way, this rank reads for the next one."""
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
        """Close the connections, and do not wait for an operation that is under way.

        torch closes a group once nothing refers to it, and waits there for its operations; so this keeps a reference to
        one with an operation under way.
        """
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
                    found=f"different bytes, in a batch that begins with {batch[0].chunk.key if batch else 'nothing'}",
                    remedy="They changed on their way through gloo, or in a host's memory: look at the host's logs.",
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
        """Wait for the operation under way, for as long as some rank gives heartbeats."""
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
        """Wait for the operation under way before this rank fails: a group cannot be closed in the middle of one."""
        if self._work is not None:
            try:
                self._finish()
            except RankMissingError:
                return

    def _lost(self, error: RuntimeError) -> RankMissingError:
        return RankMissingError(
            expected=f"ranks {ranks_listed(self.ranks)} to read for each other",
            found=brief(error),
            remedy=remedy("Look at the logs of these ranks.", "Or let every rank read for itself, with {share_reads}."),
            rank=self._coordination.rank,
        )


class _Elements:
    """Returns the elements of blocks, and reads each chunk once for its blocks that follow one another."""

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
    """The hash of a batch's blocks in memory, as an int64."""
    held = memory[_HEADER : _HEADER + sum(item.room for item in batch)]
    return digest(held.numpy()) >> 1
