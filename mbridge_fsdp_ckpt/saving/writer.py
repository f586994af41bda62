"""Writing what one rank holds, and taking it back."""

from __future__ import annotations

import logging
from typing import TypedDict

import torch

from mbridge_fsdp_ckpt.agree import sketches
from mbridge_fsdp_ckpt.agree.agreement import Agreement
from mbridge_fsdp_ckpt.live.holdings import Holding
from mbridge_fsdp_ckpt.saving import replicas
from mbridge_fsdp_ckpt.saving.snapshot import Prepared
from mbridge_fsdp_ckpt.storage.checksums import checksum
from mbridge_fsdp_ckpt.storage.commit import lease
from mbridge_fsdp_ckpt.storage.files import write_file
from mbridge_fsdp_ckpt.storage.format.names import payload_name, table_name
from mbridge_fsdp_ckpt.storage.format.payload import PayloadWriter, scalar_of
from mbridge_fsdp_ckpt.storage.format.schema import TableEntry
from mbridge_fsdp_ckpt.storage.format.table import Row, table_bytes
from mbridge_fsdp_ckpt.storage.store import as_path, is_local

_log = logging.getLogger(__name__)


class Place(TypedDict):
    """Where all ranks write, and what their names end with."""

    directory: str
    suffix: str


class Written(TypedDict):
    """A rank's message for the commit: its table's entry, and a sketch of the hashes of copies; or several ranks'."""

    tables: list[dict[str, str | int]]
    replicas: list[int]


def write(prepared: Prepared, place: Place, agreement: Agreement, choice: str = "warn") -> Written:
    """Write this rank's chunks and its table, and hash what others hold, too.

    Args:
        prepared: What to write.
        place: Where.
        agreement: Gets signs of life.
        choice: `Settings.replicas`.

    Returns:
        The message for the next meeting.

    Raises:
        OSError: The storage refused.
    """
    staging, rank, suffix = as_path(place["directory"]), agreement.rank, place["suffix"]
    if is_local(staging):
        agreement.on_beat = lease.renewing(staging)
    own = [holding for holding in prepared.holdings if holding.piece.writes]
    keys = {holding.key: holding.entry for holding in own if holding.piece.is_origin}
    rows: list[Row] = [scalar_of(item.key, _hashed(prepared, item, choice)) for item in own if item.is_scalar]
    files = []
    if len(rows) < len(own):
        payload = PayloadWriter(staging / payload_name(rank, suffix), progress=agreement.beat)
        try:
            for holding in own:
                if not holding.is_scalar:
                    rows.append(payload.add(holding.key, _hashed(prepared, holding, choice), holding.box))
                    agreement.beat()
            files.append(payload.close())
        finally:
            payload.abort()
    for holding in prepared.holdings:
        if not holding.piece.writes:
            _hashed(prepared, holding, choice)
            agreement.beat()
    update = {"rank": rank, "files": tuple(files), "keys": keys, "chunks": len(rows)}
    name, data = table_name(rank, suffix), table_bytes(prepared.header.model_copy(update=update), rows)
    write_file(staging / name, data)
    entry = TableEntry(rank=rank, name=name, size=len(data), checksum=checksum(data))
    return {"tables": [entry.model_dump()], "replicas": replicas.sketch(prepared.copies)}


def combine(messages: list[Written]) -> Written:
    """What several ranks wrote, as one message."""
    return {
        "tables": [table for message in messages for table in message["tables"]],
        "replicas": sketches.added(message["replicas"] for message in messages),
    }


def _hashed(prepared: Prepared, holding: Holding, choice: str) -> torch.Tensor:
    """A holding's elements; on the host, and noted with their hash, if they are compared with other ranks'."""
    if not replicas.is_compared(holding, choice):
        return holding.elements()
    elements = holding.elements().cpu()
    prepared.copies.append(replicas.copy_of(holding, elements))
    return elements


def take_back(place: Place, rank: int) -> None:
    """Remove what this rank wrote for a save that failed: rank 0 may have tidied up before this rank was through."""
    directory, suffix = as_path(place["directory"]), place["suffix"]
    for name in (payload_name(rank, suffix), table_name(rank, suffix)):
        try:
            (directory / name).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("could not remove %s: %s", directory / name, error)
