"""Writing what one rank holds, and taking it back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict

import torch

from mbridge_fsdp_ckpt.agree import sketches
from mbridge_fsdp_ckpt.agree.agreement import Agreement
from mbridge_fsdp_ckpt.live.holdings import Holding
from mbridge_fsdp_ckpt.phases import Phases
from mbridge_fsdp_ckpt.saving import replicas
from mbridge_fsdp_ckpt.saving.snapshot import Prepared
from mbridge_fsdp_ckpt.storage.commit import lease
from mbridge_fsdp_ckpt.storage.entries import FileEntry
from mbridge_fsdp_ckpt.storage.format.names import Files
from mbridge_fsdp_ckpt.storage.format.payload import PayloadWriter, number_of
from mbridge_fsdp_ckpt.storage.format.rows import Number, Row
from mbridge_fsdp_ckpt.storage.format.told import Told, together, write_group_index, write_own_index
from mbridge_fsdp_ckpt.storage.progress import Meter, Progress, Unwatched
from mbridge_fsdp_ckpt.storage.store import AnyPath, as_path, is_local

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
    prepared: Prepared, place: Place, agreement: Agreement, choice: str = "warn", watching: Watching | None = None
) -> Written:
    """Write this rank's chunks and its index file, and hash what others hold, too.

    Args:
        prepared: What to write.
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
    if is_local(staging):
        agreement.on_beat = lease.renewing(staging)
    own = [holding for holding in prepared.holdings if holding.piece.writes]
    keys = {holding.key: holding.entry for holding in (*own, *prepared.numbers)}
    with phases("write"):
        rows: list[Row] = [_number(prepared, item, choice) for item in prepared.numbers]
    file = None
    if chunks := [holding for holding in own if not holding.is_scalar]:
        payload = staging / files.payload(agreement.rank)
        file = _write_chunks(prepared, chunks, payload, agreement, choice, watching, rows)
    with phases("compare"):
        for holding in prepared.holdings:
            if not (holding.piece.writes or holding.is_scalar):
                _hashed(prepared, holding, choice)
                agreement.beat()
    with phases("index"):
        timed = prepared.said.own.model_copy(update={"begun": phases.begun, "phases": tuple(phases.rounded)})
        said = replace(prepared.said, rank=agreement.rank, payload=file, keys=keys, own=timed)
        told = write_own_index(staging, files, said, rows, prepared.hyperparameters)
        return {"told": told, "replicas": replicas.sketch(prepared.copies)}


def _write_chunks(
    prepared: Prepared,
    chunks: Sequence[Holding],
    path: AnyPath,
    agreement: Agreement,
    choice: str,
    watching: Watching,
    rows: list[Row],
) -> FileEntry:
    """Write this rank's payload file, and add its rows; returns its entry."""
    progress, meter = watching.progress, Meter(watching.progress)
    if progress.shown:
        progress.begin("saving", sum(chunk.entry.bytes_of(chunk.box.volume) for chunk in chunks))

    def advanced() -> None:
        agreement.beat()
        meter.reached(payload.position)

    payload = PayloadWriter(path, progress=advanced)
    try:
        with watching.phases("write"):
            for chunk in chunks:
                rows.append(payload.add(chunk.key, _hashed(prepared, chunk, choice), chunk.box))
                agreement.beat()
        with watching.phases("flush"):
            return payload.close()
    finally:
        payload.abort()


def _number(prepared: Prepared, holding: Holding, choice: str) -> Number:
    """A number that counts, or a copy of it, for this rank's own index alone."""
    elements = _hashed(prepared, holding, choice) if holding.declares else holding.elements()
    return number_of(holding.key, elements, counts=holding.declares and holding.piece.writes)


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
    return {"told": told, "replicas": sketches.added(message["replicas"] for message in messages)}


def _hashed(prepared: Prepared, holding: Holding, choice: str) -> torch.Tensor:
    """A holding's elements; on the host, and noted with their hash, if they are compared with other ranks'."""
    if not replicas.is_compared(holding, choice):
        return holding.elements()
    elements = holding.elements().cpu()
    prepared.copies.append(replicas.copy_of(holding, elements))
    return elements


def take_back(place: Place, agreement: Agreement) -> None:
    """Remove what this rank wrote for a save that failed, unless it may stand after all.

    Rank 0 may have tidied up before this rank was through.
    """
    if agreement.was_sealed():
        return
    rank, directory, files = agreement.rank, as_path(place["directory"]), files_of(place)
    for name in (files.payload(rank), files.of_rank(rank), files.of_group(rank)):
        try:
            (directory / name).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("could not remove %s: %s", directory / name, error)
