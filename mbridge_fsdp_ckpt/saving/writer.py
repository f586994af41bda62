"""Writing what one rank holds, and taking it back."""

from __future__ import annotations

import logging
from collections.abc import Buffer, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypedDict

from mbridge_fsdp_ckpt.commit import lease
from mbridge_fsdp_ckpt.coordination.coordination import Agreement
from mbridge_fsdp_ckpt.coverage import plans, replicas
from mbridge_fsdp_ckpt.coverage.replicas import Copy
from mbridge_fsdp_ckpt.format.names import Files
from mbridge_fsdp_ckpt.format.payload import PayloadWriter
from mbridge_fsdp_ckpt.format.rows import Chunk
from mbridge_fsdp_ckpt.format.write_results import Told, together, write_group_index, write_own_index
from mbridge_fsdp_ckpt.io.checksums import Hasher, digest
from mbridge_fsdp_ckpt.io.entries import FileEntry
from mbridge_fsdp_ckpt.io.progress import Meter, Progress, Unwatched
from mbridge_fsdp_ckpt.io.store import AnyPath, as_path, is_local, store_of
from mbridge_fsdp_ckpt.phases import Phases
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name
from mbridge_fsdp_ckpt.saving.write_plan import Elements, Outgoing

_log = logging.getLogger(__name__)


class Place(TypedDict):
    """Where all ranks write, and what their files are called: see `Files`."""

    directory: str
    save: str
    suffix: str


class Written(TypedDict):
    """A rank's message for the commit, or several ranks': of their index, and a sketch of the hashes of copies."""

    told: Told
    replicas: list[int]


def files_of(place: Place) -> Files:
    """What files are called at a place."""
    return Files(place["save"], place["suffix"])


@dataclass(frozen=True, slots=True)
class Watching:
    """What a save is told by while it writes.

    Args:
        phases: Its clock.
        progress: Who watches.
    """

    phases: Phases = field(default_factory=Phases)
    progress: Progress = field(default_factory=Unwatched)


def write(
    outgoing: Outgoing,
    elements: Elements,
    place: Place,
    agreement: Agreement,
    choice: str = "warn",
    watching: Watching | None = None,
) -> Written:
    """Write this rank's chunks and its index file, and hash what others hold, too.

    Args:
        outgoing: What to write; learns the hashes.
        elements: Of its blocks.
        place: Where.
        agreement: Gets signs of life.
        choice: `Settings.replicas`.
        watching: See there.

    Returns:
        The message for the next meeting.

    Raises:
        OSError: The storage refused.
    """
    staging, files, watching = as_path(place["directory"]), files_of(place), watching or Watching()
    phases = watching.phases
    if is_local(staging) or agreement.rank == 0:  # which waits for all: stores limit how often one object is written
        agreement.on_beat = lease.renewing(lease.of_save(staging, files))
    chunks, file = _write_chunks(
        outgoing, elements, staging / files.payload(agreement.rank), agreement, choice, watching
    )
    with phases("compare"):
        outgoing.copies += _copies_of_numbers(outgoing, choice)
        compared = outgoing.compared(choice)
        for number, digested in zip(compared, elements.digests(compared), strict=True):
            outgoing.copies.append(replicas.copy_of(outgoing.blocks[number], digested))
            agreement.beat()
    with phases("index"):
        timed = outgoing.said.own.model_copy(update={"begun": phases.begun, "phases": tuple(phases.rounded)})
        said = replace(outgoing.said, keys=outgoing.keys, rank=agreement.rank, payload=file, own=timed)
        told = write_own_index(staging, files, said, [*chunks, *outgoing.numbers], outgoing.hyperparameters)
        return {"told": told, "replicas": replicas.sketch(outgoing.copies)}


def _write_chunks(
    outgoing: Outgoing, elements: Elements, path: AnyPath, agreement: Agreement, choice: str, watching: Watching
) -> tuple[list[Chunk], FileEntry | None]:
    """Write this rank's payload file, if it has any chunks; returns their rows and its entry."""
    numbers, rows = outgoing.chunks, list[Chunk]()
    if not numbers:
        return rows, None
    progress, meter = watching.progress, Meter(watching.progress)
    if progress.shown:
        progress.begin("saving", sum(outgoing.blocks[number].nbytes for number in numbers))

    def advanced() -> None:
        agreement.beat()
        meter.reached(payload.position)

    payload = PayloadWriter(path, progress=advanced)
    try:
        with watching.phases("write"):
            for number, pieces in zip(numbers, elements.each(numbers), strict=True):
                block = outgoing.blocks[number]
                hasher = Hasher() if replicas.is_compared(block, choice) else None
                if hasher is not None:
                    pieces = _hashed(pieces, hasher)
                rows += payload.add_block(block.key, dtype_from_name(block.dtype), pieces, block.box)
                if hasher is not None:
                    outgoing.copies.append(replicas.copy_of(block, hasher.number()))
                agreement.beat()
        with watching.phases("flush"):
            return rows, payload.close()
    finally:
        payload.abort()


def _hashed(pieces: Iterable[Buffer], hasher: Hasher) -> Iterator[Buffer]:
    for piece in pieces:
        hasher.update(piece)
        yield piece


def _copies_of_numbers(outgoing: Outgoing, choice: str) -> Iterator[Copy]:
    data_of = {number.key: number.data for number in outgoing.numbers}
    for block in outgoing.blocks:
        if block.is_scalar and replicas.is_compared(block, choice):
            yield replicas.copy_of(block, digest(data_of[block.key]))


def combine(place: Place, leader: int | None, messages: list[Written]) -> Written:
    """What several ranks wrote, as one message; who leads their group merges their index files.

    Args:
        place: Where they wrote.
        leader: This rank, if it leads a group.
        messages: Theirs.
    """
    told = together(message["told"] for message in messages)
    if leader is not None:
        told = write_group_index(as_path(place["directory"]), files_of(place), leader, told)
    return {"told": told, "replicas": plans.added(message["replicas"] for message in messages)}


def take_back(place: Place, agreement: Agreement) -> None:
    """Remove what this rank wrote for a save that failed, unless it may stand after all.

    Rank 0 may have tidied up before this rank was through.
    """
    if agreement.was_sealed():
        return
    rank, directory, files = agreement.rank, as_path(place["directory"]), files_of(place)
    for name in (files.payload(rank), files.of_rank(rank), files.of_group(rank), *([files.lease] if rank == 0 else [])):
        try:
            store_of(directory / name).remove()
        except OSError as error:
            _log.warning("could not remove %s: %s", directory / name, error)
