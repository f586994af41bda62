"""The steps of a load, each of one rank; `checkpoint.load` tells their story."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mbridge_fsdp_ckpt.agree.agreement import Agreement
from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.families import default_registry
from mbridge_fsdp_ckpt.live.fp8.owners import restorations
from mbridge_fsdp_ckpt.live.fp8.state import Restoration
from mbridge_fsdp_ckpt.live.holdings import KeyFilter, OptimizerPart, Planned, optimizer_parts, plan_model
from mbridge_fsdp_ckpt.live.megatron_fsdp import find_fsdp_module
from mbridge_fsdp_ckpt.live.optimizer.base import Hyperparameters
from mbridge_fsdp_ckpt.live.topology import coordinates
from mbridge_fsdp_ckpt.loading.match import Match, check_coverage, slots_by_name
from mbridge_fsdp_ckpt.loading.renaming import under_new_names
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
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
