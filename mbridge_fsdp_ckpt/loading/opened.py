"""The steps of a load, each of one rank; `checkpoint.load` tells their story."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch

from mbridge_fsdp_ckpt.agree import sketches
from mbridge_fsdp_ckpt.agree.agreement import Agreement
from mbridge_fsdp_ckpt.errors import ConfigurationError, KeyMismatchError, PlanDisagreementError
from mbridge_fsdp_ckpt.families import default_registry
from mbridge_fsdp_ckpt.live.fp8.owners import restorations
from mbridge_fsdp_ckpt.live.fp8.state import Restoration
from mbridge_fsdp_ckpt.live.holdings import KeyFilter, OptimizerPart, Planned, optimizer_parts, plan_model
from mbridge_fsdp_ckpt.live.megatron_fsdp import find_fsdp_module
from mbridge_fsdp_ckpt.live.optimizer.base import Hyperparameters
from mbridge_fsdp_ckpt.live.topology import coordinates
from mbridge_fsdp_ckpt.loading.match import NAMED, Match, check_coverage, listed, slots_by_name
from mbridge_fsdp_ckpt.loading.renaming import under_new_names
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.keys import MODEL_PREFIX, STATE_PREFIX, KeyEntry
from mbridge_fsdp_ckpt.plan.pieces import ParameterPlan, Piece
from mbridge_fsdp_ckpt.settings import Settings
from mbridge_fsdp_ckpt.storage.commit.methods import recover
from mbridge_fsdp_ckpt.storage.opening import check_other_files, open_checkpoint
from mbridge_fsdp_ckpt.storage.source import CheckpointSource, RankRecord, StoredChunk, sizes_of
from mbridge_fsdp_ckpt.storage.store import AnyPath
from mbridge_fsdp_ckpt.versions import require


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be filled.

    Args:
        model: See `checkpoint.load`.
        optimizer: See there.
        include: See there.
        with_state: Whether the optimizer gets state, or only refreshes its copies of the weights.
    """

    model: Any
    optimizer: Any
    include: KeyFilter | None
    with_state: bool


@dataclass(slots=True)
class Opened:
    """A checkpoint that fits this rank; its bytes are read by `fill`.

    Args:
        module: The model's `MegatronFSDP` module.
        planned: What of it is loaded.
        chunks: Where each needed key lies.
        needed: The blocks of each key that this rank needs.
        asked: Keys that have a place in this model.
    """

    source: CheckpointSource
    settings: Settings
    module: Any
    include: KeyFilter | None
    planned: list[Planned]
    parts: list[OptimizerPart]
    with_state: bool
    chunks: dict[str, list[StoredChunk]] = field(default_factory=dict)
    needed: dict[str, list[Box]] = field(default_factory=dict)
    hyperparameters: dict[str, Hyperparameters] = field(default_factory=dict)
    slots: dict[str, dict[str, KeyEntry]] = field(default_factory=dict)
    scaling: list[Restoration] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    skipped: list[str] = field(default_factory=list)

    @property
    def verified(self) -> bool:
        """Whether every byte is checked before it is used."""
        return self.settings.verify == "full"


class Asked(TypedDict):
    """A rank's message for the verification: which checkpoint, and a sketch of the keys that it asked for."""

    checkpoint: str
    asked: list[int]


class KeysJudged(TypedDict):
    """The buckets in which keys do not add up, and keys that nobody is to ask for."""

    disputed: list[int]
    unread: list[str]


class AskedByName(TypedDict):
    """A rank's message where they don't: keys that it asked for in these buckets, each with the replica it holds."""

    asked: list[tuple[str, int]]
    buckets: list[int]


def open_and_match(directory: AnyPath, wanted: Wanted, settings: Settings, agreement: Agreement) -> Opened:
    """Open the checkpoint and match it with the live model.

    Raises:
        KeyMismatchError: Keys are missing, or of another shape or dtype.
        CheckpointError: The checkpoint cannot be read.
    """
    require("save and load")
    recover(directory)
    source = open_checkpoint(directory)
    _check_families(source, settings)
    module, include = find_fsdp_module(wanted.model), wanted.include
    everything = plan_model(module)
    source = under_new_names(source, [item.plan for item in everything])
    planned = [p for p in everything if include is None or include(p.plan.layout.key)]
    parts = optimizer_parts(wanted.optimizer, everything) if wanted.optimizer is not None else []
    opened = Opened(source, settings, module, include, planned, parts, wanted.with_state and bool(parts))
    match = Match(source, settings)
    for item in planned:
        match.weights(item)
    if opened.with_state:
        opened.slots = slots_by_name(source)
        match.section("optimizer")
        plans = [plan for part in parts for _, plan in part.parameters()]
        for plan in plans:
            match.slots(plan, opened.slots)
        opened.hyperparameters = source.hyperparameters(plan.layout.optimizer_name for plan in plans)
        _check_groups(opened)
    match.finish()
    opened.scaling = restorations(module, ((rank.coordinates, rank.extra_state) for rank in source.ranks()))
    opened.asked, opened.skipped = match.asked, match.skipped
    opened.needed, opened.chunks = match.needed, source.chunks(sorted(match.needed))
    check_coverage(opened.needed, opened.chunks)
    if agreement.rank == 0:
        check_other_files(source.head, content=opened.verified, progress=agreement.beat)
    return opened


def _check_families(source: CheckpointSource, settings: Settings) -> None:
    split = {
        entry.family: key
        for key, entry in source.head.keys.items()
        if entry.family is not None and not settings.may_be_unexpected(key)
    }
    default_registry().check_installed(split)


def _check_groups(opened: Opened) -> None:
    """Parameters of one live group must have been saved with the same hyperparameters.

    Raises:
        ConfigurationError: The live optimizer groups its parameters otherwise.
    """
    for part in opened.parts:
        for _, names in part.group_names():
            saved = [name for name in names if name in opened.hyperparameters]
            for name in saved[1:]:
                first, other = opened.hyperparameters[saved[0]], opened.hyperparameters[name]
                unlike = sorted(key for key in first.keys() | other.keys() if not _same(first.get(key), other.get(key)))
                if unlike:
                    raise ConfigurationError(
                        expected=f"one set of hyperparameters for the param group of {saved[0]}",
                        found=f"{name} was saved with another {', '.join(unlike)}",
                        remedy="Build the optimizer with the param groups it was saved with.",
                    )


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def announce(opened: Opened) -> Asked:
    """The bounded message for the verification."""
    asked = ((key, sketches.key_word(key) * sketches.share_of_one(piece.replica)) for key, piece in _declared(opened))
    return {"checkpoint": opened.source.head.identity, "asked": sketches.in_buckets(asked)}


def _declared(opened: Opened) -> list[tuple[str, Piece]]:
    """Keys whose first element this rank holds: over all ranks, each key once a replica."""
    declared = []
    for item in opened.planned:
        declared += [(item.plan.model_key(piece.component), piece) for piece in _origins(item.plan)]
    if opened.with_state:
        for part in opened.parts:
            for _, plan in part.parameters():
                for piece in _origins(plan):
                    slots = opened.slots.get(plan.state_name(piece.component), {})
                    declared += [(plan.slot_key(piece.component, slot), piece) for slot in slots]
    return [(key, piece) for key, piece in declared if key in opened.asked]


def _origins(plan: ParameterPlan) -> list[Piece]:
    """A later stage's copy is no replica: the first stage asks for its key."""
    return [] if plan.layout.is_copy else [piece for piece in plan.pieces if piece.is_origin]


def judge(opened: Opened, messages: Sequence[Asked]) -> KeysJudged:
    """First meeting: does somebody ask for every key of the checkpoint?"""
    identities = {message["checkpoint"] for message in messages}
    if len(identities) > 1:
        raise ConfigurationError(
            expected="all ranks to read the same checkpoint",
            found=f"{len(identities)} different ones: {', '.join(sorted(identities))}",
            remedy="Is the directory on a file system that all hosts share, and settled?",
        )
    offered = sketches.in_buckets((key, -sketches.key_word(key)) for key in _offered(opened))
    bad = sketches.add([*(message["asked"] for message in messages), offered])
    unread = sorted(key for key in opened.source.head.keys if opened.settings.may_be_unexpected(key))[:NAMED]
    return {"disputed": list(bad), "unread": unread}


def _offered(opened: Opened) -> list[str]:
    """Keys of the checkpoint that somebody has to ask for."""
    keys, include = opened.source.head.keys, opened.include or (lambda key: True)
    model = [key for key in keys if key.startswith(MODEL_PREFIX) and include(key.removeprefix(MODEL_PREFIX))]
    state = [key for key in keys if key.startswith(STATE_PREFIX)] if opened.with_state else []
    return [key for key in model + state if not opened.settings.may_be_unexpected(key)]


def disputed(opened: Opened, buckets: list[int]) -> AskedByName:
    """Keys that this rank asked for, in the buckets that did not add up."""
    wanted = set(buckets)
    asked = sorted((key, p.replica.index) for key, p in _declared(opened) if sketches.bucket_of(key) in wanted)
    return {"asked": asked, "buckets": buckets}


def judge_disputed(opened: Opened, messages: Sequence[AskedByName]) -> None:
    """Only where the keys do not add up: name those that nobody asks for.  Some ranks alone may ask for one."""
    asked = Counter((key, replica) for message in messages for key, replica in message["asked"])
    known = {key for key, _ in asked}
    wanted = {bucket for message in messages for bucket in message["buckets"]}
    offered = [key for key in _offered(opened) if sketches.bucket_of(key) in wanted]
    unexpected = [key for key in offered if key not in known]
    if unexpected:
        raise KeyMismatchError(
            expected="every key of the checkpoint to have a place in the model",
            found=f"{len(unexpected)} unexpected: {listed(unexpected)}",
            remedy="Load a checkpoint of the same model, or name keys to leave unread in allow_unexpected.",
        )
    twice = sorted({key for (key, _), times in asked.items() if times > 1})
    if twice:
        raise PlanDisagreementError(
            expected="one rank to hold the first element of a replica",
            found=f"{len(twice)} keys of which several do: {listed(twice)}",
            remedy="The ranks hold different models, or do not know of each other. Nothing was changed.",
            key=twice[0],
        )


def records_of(opened: Opened) -> tuple[RankRecord | None, tuple[RankRecord, ...]]:
    """The record saved at this rank's coordinates, and those of its (pipeline, tensor) place."""
    place = coordinates()
    near = tuple(
        record
        for record in opened.source.ranks()
        if all(record.coordinates.get(axis) == place.get(axis) for axis in ("pipeline", "tensor"))
    )
    exact = [record for record in near if dict(record.coordinates) == place]
    return (exact[0] if exact else None), near


def topology_of(source: CheckpointSource) -> Mapping[str, int | str]:
    """The saving job's sizes; of stock, which does not say them, those that its ranks' places tell."""
    return source.head.topology or sizes_of(record.coordinates for record in source.ranks())
