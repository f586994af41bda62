"""The steps of a save, each of one rank; `checkpoint.save` tells their story."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mbridge_fsdp_ckpt.agree import sketches
from mbridge_fsdp_ckpt.agree.meeting import Agreement
from mbridge_fsdp_ckpt.agree.sketches import Block
from mbridge_fsdp_ckpt.errors import CheckpointError, ConfigurationError, ReplicaMismatchError, describe_unexpected
from mbridge_fsdp_ckpt.live.fp8.owners import own_states
from mbridge_fsdp_ckpt.live.holdings import (
    Holding,
    KeyFilter,
    model_holdings,
    optimizer_holdings,
    optimizer_parts,
    plan_model,
)
from mbridge_fsdp_ckpt.live.topology import coordinates, sharding_strategy, topology
from mbridge_fsdp_ckpt.plan.keys import KeyEntry, Section
from mbridge_fsdp_ckpt.saving import copies
from mbridge_fsdp_ckpt.saving.copies import Copy
from mbridge_fsdp_ckpt.settings import Settings
from mbridge_fsdp_ckpt.storage.checksums import checksum
from mbridge_fsdp_ckpt.storage.commit import lease, methods, removal
from mbridge_fsdp_ckpt.storage.commit.content import Commit
from mbridge_fsdp_ckpt.storage.files import check_file, write_file
from mbridge_fsdp_ckpt.storage.finishing import finish, head
from mbridge_fsdp_ckpt.storage.format.names import payload_name, table_name
from mbridge_fsdp_ckpt.storage.format.payload import PayloadWriter, scalar_of
from mbridge_fsdp_ckpt.storage.format.schema import TableEntry, TableHeader
from mbridge_fsdp_ckpt.storage.format.table import Row, read_table_header, table_bytes
from mbridge_fsdp_ckpt.storage.format.values import encode
from mbridge_fsdp_ckpt.storage.stock.view import say_view_left_out
from mbridge_fsdp_ckpt.storage.store import AnyPath, as_path, is_local
from mbridge_fsdp_ckpt.versions import require, writer_versions

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Prepared:
    """What one rank is about to write; `sketch` is what the others learn of it, `copies` what it saw while writing."""

    holdings: list[Holding]
    sketch: list[int]
    header: dict[str, Any]
    sections: tuple[Section, ...]
    strategy: str
    copies: list[Copy] = field(default_factory=list)


def prepare(
    model: Any,
    optimizer: Any,
    include: KeyFilter | None,
    rank_values: Mapping[str, Any] | None,
    vocabulary_size: int | None = None,
) -> Prepared:
    """Plan this rank's part.  No communication, no copies.

    Raises:
        CheckpointError: The model or the optimizer cannot be saved.
    """
    require("torch", "megatron-core")
    planned = plan_model(model)
    holdings = list(model_holdings(planned, include, vocabulary_size))
    parts = optimizer_parts(optimizer, planned) if optimizer is not None else []
    slots, stateless = optimizer_holdings(parts, vocabulary_size)
    header = {
        "coordinates": coordinates(),
        "parameter_groups": [_encode_group(*group) for part in parts for group in part.group_names()],
        "stateless": stateless,
        "values": encode(dict(rank_values or {}), "rank_values"),
        "extra_state": encode(own_states(model), "extra_state"),
    }
    holdings += slots
    sections: tuple[Section, ...] = ("model", "optimizer") if parts else ("model",)
    return Prepared(holdings, sketches.sketch(map(Block.of, holdings)), header, sections, sharding_strategy(model))


def _encode_group(hyperparameters: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    return {"hyperparameters": encode(hyperparameters, "optimizer.param_to_group_meta"), "parameters": names}


def announce(prepared: Prepared) -> dict[str, Any]:
    """The bounded message for the agreement."""
    return {
        "sketch": prepared.sketch,
        "sections": list(prepared.sections),
        "strategy": prepared.strategy,
    }


def disputed(prepared: Prepared, buckets: list[int]) -> list[list[Any]]:
    """This rank's blocks in the buckets that did not add up."""
    return sketches.blocks_in(map(Block.of, prepared.holdings), buckets)


def differing(prepared: Prepared, buckets: list[int]) -> list[list[Any]]:
    """This rank's hashes of copies in the buckets that did not add up."""
    return copies.copies_in(prepared.copies, buckets)


def write(prepared: Prepared, place: Mapping[str, str], agreement: Agreement, choice: str = "warn") -> dict[str, Any]:
    """Write this rank's chunks and its table, and hash what others hold, too.

    Args:
        prepared: What to write.
        place: Where: "directory", and the "suffix" of names.
        agreement: Gets signs of life.
        choice: `Settings.replicas`.

    Returns:
        The table's entry, and a sketch of the hashes.

    Raises:
        OSError: The storage refused.
    """
    staging = as_path(place["directory"])
    if is_local(staging):
        agreement.on_beat = lease.renewing(staging)
    table = table_name(agreement.rank, place["suffix"])
    own = [holding for holding in prepared.holdings if holding.piece.writes]
    keys = {holding.key: holding.entry for holding in own if holding.piece.is_origin}
    rows: list[Row] = [scalar_of(item.key, _hashed(prepared, item, choice)) for item in own if item.is_scalar]
    rank, files = agreement.rank, []
    if len(rows) < len(own):
        writer = PayloadWriter(staging / payload_name(agreement.rank, place["suffix"]), progress=agreement.beat)
        try:
            for holding in own:
                if not holding.is_scalar:
                    rows.append(writer.add(holding.key, _hashed(prepared, holding, choice), holding.box))
                    agreement.beat()
            files.append(writer.close())
        finally:
            writer.abort()
    for holding in prepared.holdings:
        if not holding.piece.writes:
            _hashed(prepared, holding, choice)
            agreement.beat()
    header = TableHeader(rank=rank, files=tuple(files), keys=keys, chunks=len(rows), **prepared.header)
    data = table_bytes(header, rows)
    write_file(staging / table, data)
    entry = TableEntry(rank=rank, name=table, size=len(data), checksum=checksum(data))
    return {"table": entry.model_dump(), "replicas": copies.sketch(prepared.copies)}


def _hashed(prepared: Prepared, holding: Holding, choice: str) -> torch.Tensor:
    """A holding's elements; on the host, and noted with their hash, if they are compared with other ranks'."""
    if not copies.is_compared(holding, choice):
        return holding.elements()
    elements = holding.elements().cpu()
    prepared.copies.append(copies.copy_of(holding, elements))
    return elements


def take_back(place: Mapping[str, str], rank: int) -> None:
    """Remove what this rank wrote for a save that failed: rank 0 may have tidied up before this rank was through."""
    directory, suffix = as_path(place["directory"]), place["suffix"]
    for name in (payload_name(rank, suffix), table_name(rank, suffix)):
        try:
            (directory / name).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("could not remove %s: %s", directory / name, error)


@dataclass(slots=True)
class Job:
    """Rank 0's side of a save: it judges the meetings, owns the staging directory, and commits."""

    target: AnyPath
    settings: Settings
    agreement: Agreement
    values: Mapping[str, Any]
    add_files: Callable[[Path], None] | None
    after_commit: Callable[[], None] | None = None
    _commit: Commit | None = field(default=None)
    _replaced: list[AnyPath] = field(default_factory=list)
    _sections: tuple[Section, ...] = field(default=())
    _strategy: str = field(default="")
    _remainders: dict[int, int] = field(default_factory=dict)
    _tables: list[TableEntry] = field(default_factory=list)

    def judge_plans(self, messages: list[Any]) -> dict[str, Any]:
        """First meeting: do the plans tile every tensor?  Makes the staging directory if so."""
        sections = {tuple(message["sections"]) for message in messages}
        if len(sections) > 1:
            raise ConfigurationError(
                expected="all ranks to save the same sections",
                found=" and ".join(", ".join(s) for s in sorted(sections)),
                remedy="Pass the optimizer on every rank, or on none.",
            )
        self._sections, self._strategy = sections.pop(), messages[0]["strategy"]
        self._remainders = sketches.add([message["sketch"] for message in messages])
        return {"disputed": list(self._remainders)} if self._remainders else self._begin()

    def judge_dispute(self, messages: list[Any]) -> dict[str, Any]:
        """Only where plans do not add up: tensors that some ranks do not hold may be in order all the same."""
        sketches.judge(messages, self._remainders)
        return self._begin()

    def _begin(self) -> dict[str, Any]:
        """Make the staging directory; returns where to write."""
        methods.recover(self.target)
        removal.delete_later(methods.condemn_leftovers(self.target, self.settings.commit))
        self._commit = methods.begin(self.target, self.settings.commit)
        return {"disputed": [], "directory": str(self._commit.directory), "suffix": self._commit.suffix}

    def judge_written(self, messages: list[Any]) -> dict[str, Any]:
        """Second meeting: commit what all ranks wrote, unless copies of a tensor are unlike."""
        self._tables = [TableEntry(**message["table"]) for message in messages]
        self._remainders = sketches.add([message["replicas"] for message in messages])
        if not self._remainders:
            self._finish()
        return {"differing": list(self._remainders)}

    def judge_replicas(self, messages: list[Any]) -> None:
        """Only where hashes of copies do not add up: name the copies, then commit or not, as the settings say."""
        error = copies.mismatch(messages, self._remainders)
        if error is not None and (self.settings.replicas == "error" or not isinstance(error, ReplicaMismatchError)):
            raise error
        if error is not None:
            _log.warning("%s", error)
        self._finish()

    def _finish(self) -> None:
        """Check what all ranks wrote, write the head, commit."""
        assert self._commit is not None
        directory, tables = self._commit.directory, self._tables
        keys: dict[str, KeyEntry] = {}
        declared_by: dict[str, int] = {}
        flushed, chunks = {entry.name for entry in tables}, 0
        for entry in tables:
            header = read_table_header(check_file(directory, entry))
            for file in header.files:
                check_file(directory, file)
                flushed.add(file.name)
            sketches.declare(declared_by, header.rank, header.keys)
            keys.update(header.keys)
            chunks += header.chunks
            self.agreement.beat()
        manifest = head(
            writer=writer_versions(training=True),
            topology={**topology(), "strategy": self._strategy},
            sections=self._sections,
            keys=keys,
            tables=tables,
            values=encode(dict(self.values), "values"),
        )
        with_view = self.settings.writes_dcp_metadata(chunks)
        if not with_view and self.settings.dcp_metadata == "auto":
            say_view_left_out(chunks)
        self._replaced = finish(
            self._commit,
            manifest,
            flushed,
            view_of=self.values if with_view else None,
            add_files=self.add_files,
            progress=self.agreement.beat,
            last_call=self.agreement.seal,
        )
        self._commit = None
        self._follow_up()

    def _follow_up(self) -> None:
        """What the caller does after a commit: others must not go on while this rank fails at it."""
        self.agreement.beat()
        try:
            if self.after_commit is not None:
                self.after_commit()
        except Exception as error:
            _log.exception("%s is in its place, what follows failed", self.target)
            named = describe_unexpected(error, rank=self.agreement.rank, doing="following up the commit")
            stands = f"The checkpoint is complete and in its place, a tracker may name the one before: {self.target}."
            raise CheckpointError.from_wire(named.to_wire() | {"remedy": f"{stands} {named.remedy}"}) from error

    def clean_up(self) -> None:
        """After the verdict: have deleted what was replaced, or what a save that failed has written."""
        removal.delete_later(self._replaced)
        if self._commit is not None:
            try:
                self._commit.abort()
            except OSError:
                _log.warning("could not remove %s", self._commit.directory, exc_info=True)
