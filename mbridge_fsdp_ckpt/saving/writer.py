# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Writing one rank's chunks and index file, the meeting that commits a save, and rolling a failed save back."""

from __future__ import annotations

import logging
from collections.abc import Buffer, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypedDict

from mbridge_fsdp_ckpt.commit import lease
from mbridge_fsdp_ckpt.coordination.coordination import Coordination
from mbridge_fsdp_ckpt.coordination.outcome import Outcome
from mbridge_fsdp_ckpt.coordination.rounds import Round
from mbridge_fsdp_ckpt.coverage.buckets import added, fingerprint
from mbridge_fsdp_ckpt.coverage.replicas import Copy, is_compared
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.format.payload import PayloadWriter
from mbridge_fsdp_ckpt.format.rows import Chunk
from mbridge_fsdp_ckpt.format.write_results import WriteResult, together, write_group_index, write_own_index
from mbridge_fsdp_ckpt.io.checksums import Hasher, digest
from mbridge_fsdp_ckpt.io.entries import FileEntry
from mbridge_fsdp_ckpt.io.progress import Meter, Progress, Unwatched
from mbridge_fsdp_ckpt.io.store import AnyPath, as_path, is_local, store_of
from mbridge_fsdp_ckpt.phases import Phases
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name
from mbridge_fsdp_ckpt.saving.commit import Job, Place, files_of
from mbridge_fsdp_ckpt.saving.write_plan import Elements, WritePlan

_log = logging.getLogger(__name__)


class Written(TypedDict):
    """The message of one rank to the commit round, or of several ranks combined.

    Args:
        result: What the ranks wrote.
        replicas: The sums of the hashes of copies, by bucket.
    """

    result: WriteResult
    replicas: list[int]


@dataclass(frozen=True, slots=True)
class Watching:
    """The objects to which a save reports while it writes.

    Args:
        phases: The clock of the save.
        progress: Receives the progress of the save.
    """

    phases: Phases = field(default_factory=Phases)
    progress: Progress = field(default_factory=Unwatched)


def write(
    write_plan: WritePlan,
    elements: Elements,
    place: Place,
    coordination: Coordination,
    choice: str = "warn",
    watching: Watching | None = None,
) -> Written:
    """Write this rank's chunks and its index file, and hash the blocks that other ranks hold, too.

    Args:
        write_plan: What to write; the hashes are added to its `copies`.
        elements: The elements of the plan's blocks.
        place: Where all ranks write.
        coordination: Receives heartbeats.
        choice: `Settings.replicas`.
        watching: The clock of the save, and the receiver of its progress; None for neither.

    Returns:
        The message for the next meeting.

    Raises:
        OSError: The storage refused.
    """
    staging, files, watching = as_path(place["directory"]), files_of(place), watching or Watching()
    phases = watching.phases
    if is_local(staging) or coordination.rank == 0:  # object stores limit how often one object, the lease, is written
        coordination.on_heartbeat = lease.renewing(lease.of_save(staging, files))
    chunks, file = _write_chunks(
        write_plan, elements, staging / files.payload(coordination.rank), coordination, choice, watching
    )
    with phases("compare"):
        write_plan.copies += _copies_of_numbers(write_plan, choice)
        compared = write_plan.compared(choice)
        for number, digested in zip(compared, elements.digests(compared), strict=True):
            write_plan.copies.append(Copy(write_plan.blocks[number], digested))
            coordination.heartbeat()
    with phases("index"):
        timed = write_plan.said.own.model_copy(update={"begun": phases.begun, "phases": tuple(phases.rounded)})
        said = replace(write_plan.said, keys=write_plan.keys, rank=coordination.rank, payload=file, own=timed)
        result = write_own_index(staging, files, said, [*chunks, *write_plan.numbers], write_plan.hyperparameters)
        return {"result": result, "replicas": fingerprint(write_plan.copies)}


def _write_chunks(
    write_plan: WritePlan,
    elements: Elements,
    path: AnyPath,
    coordination: Coordination,
    choice: str,
    watching: Watching,
) -> tuple[list[Chunk], FileEntry | None]:
    """Write this rank's payload file, if it has chunks; returns the rows of the chunks and the entry of the file."""
    numbers, rows = write_plan.chunks, list[Chunk]()
    if not numbers:
        return rows, None
    progress, meter = watching.progress, Meter(watching.progress)
    if progress.shown:
        progress.begin("saving", sum(write_plan.blocks[number].nbytes for number in numbers))

    def advanced() -> None:
        coordination.heartbeat()
        meter.reached(payload.position)

    payload = PayloadWriter(path, progress=advanced)
    try:
        with watching.phases("write"):
            for number, pieces in zip(numbers, elements.each(numbers), strict=True):
                block = write_plan.blocks[number]
                hasher = Hasher() if is_compared(block, choice) else None
                if hasher is not None:
                    pieces = _hashed(pieces, hasher)
                rows += payload.add_block(block.key, dtype_from_name(block.dtype), pieces, block.box)
                if hasher is not None:
                    write_plan.copies.append(Copy(block, hasher.number()))
                coordination.heartbeat()
        with watching.phases("flush"):
            return rows, payload.close()
    finally:
        payload.abort()


def _hashed(pieces: Iterable[Buffer], hasher: Hasher) -> Iterator[Buffer]:
    for piece in pieces:
        hasher.update(piece)
        yield piece


def _copies_of_numbers(write_plan: WritePlan, choice: str) -> Iterator[Copy]:
    data_of = {number.key: number.data for number in write_plan.numbers}
    for block in write_plan.blocks:
        if block.is_scalar and is_compared(block, choice):
            yield Copy(block, digest(data_of[block.key]))


class WrittenDecided(TypedDict):
    """The coordinator's decision of the commit round.

    Args:
        sums: The sums of all ranks' hashes of copies, by bucket, if they are not zero; else empty.  The save is
            committed only in the latter case.
        bytes: Bytes of payload that all ranks wrote.
    """

    sums: list[int]
    bytes: int


@dataclass(slots=True)
class CommitRound(Round[Written, WrittenDecided]):
    """Second meeting of a save: groups of ranks merge their index files, and rank 0 commits what all have written.

    Args:
        job: The save.
        own: The write plan of this rank.
        place: Where all ranks write.
        written: This rank's message, or the error that it failed with.
    """

    job: Job
    own: WritePlan
    place: Place
    written: Outcome[Written]
    _result: WriteResult = field(default_factory=lambda: together([]))
    phase = "commit"

    def message(self) -> Written | CheckpointError:
        """This rank's message, or the error that it failed with."""
        return self.written.brought

    def combine(self, messages: list[Written]) -> Written:
        """Combine what several ranks wrote.  A rank that leads a group merges the group's index files."""
        result = together(message["result"] for message in messages)
        if (leader := self.job.coordination.leads) is not None:
            result = write_group_index(as_path(self.place["directory"]), files_of(self.place), leader, result)
        return {"result": result, "replicas": added(message["replicas"] for message in messages)}

    def decide(self, whole: Written) -> WrittenDecided:
        """Commit if the sums of copies are zero."""
        self._result, sums = whole["result"], whole["replicas"] if any(whole["replicas"]) else []
        if not sums:
            self.finish()
        return {"sums": sums, "bytes": self._result["bytes"]}

    def finish(self) -> None:
        """Commit what all ranks wrote, on rank 0."""
        self.job.finish(self._result, self.own.sections, self.own.topology)


def roll_back(place: Place, coordination: Coordination) -> None:
    """Remove the files that this rank wrote for a failed save, unless rank 0 may have committed them.

    Rank 0 may have removed the staging directory before.
    """
    if coordination.was_fenced():
        return
    rank, directory, files = coordination.rank, as_path(place["directory"]), files_of(place)
    for name in (files.payload(rank), files.of_rank(rank), files.of_group(rank), *([files.lease] if rank == 0 else [])):
        try:
            store_of(directory / name).remove()
        except OSError as error:
            _log.warning("could not remove %s: %s", directory / name, error)
