"""The steps of a load, each of one rank; `checkpoint.load` tells their story."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from mbridge_fsdp_ckpt.agree.agreement import Agreement
from mbridge_fsdp_ckpt.errors import ConfigurationError, FamilyError
from mbridge_fsdp_ckpt.families import default_registry
from mbridge_fsdp_ckpt.live.copies import Mates, ranks_with_copies
from mbridge_fsdp_ckpt.live.fp8.owners import restorations
from mbridge_fsdp_ckpt.live.holdings import KeyFilter, OptimizerPart, holds_some, optimizer_parts
from mbridge_fsdp_ckpt.live.megatron_fsdp import find_fsdp_module
from mbridge_fsdp_ckpt.live.optimizer.adapters import grouped
from mbridge_fsdp_ckpt.live.optimizer.base import Hyperparameters
from mbridge_fsdp_ckpt.live.planned import Planned, plan_model
from mbridge_fsdp_ckpt.live.topology import coordinates
from mbridge_fsdp_ckpt.loading.match import Match, check_coverage
from mbridge_fsdp_ckpt.loading.own_state import OwnState
from mbridge_fsdp_ckpt.loading.renaming import under_new_names
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.plan.pieces import ParameterPlan
from mbridge_fsdp_ckpt.settings import Settings
from mbridge_fsdp_ckpt.storage.commit.methods import recover
from mbridge_fsdp_ckpt.storage.files import malformed
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


class Restored(Protocol):
    """State of a module that is read and checked."""

    def apply(self) -> None:
        """Put it in place."""


@dataclass(slots=True)
class Opened:
    """A checkpoint that fits this rank; its bytes are read by `fill`.

    Args:
        module: The model's `MegatronFSDP` module.
        planned: What of it is loaded.
        chunks: Where each needed key lies.
        needed: The blocks of each key that this rank needs.
        scaling: FP8 state, and what modules keep beside tensors.
        asked: Keys that have a place in this model.
        offered: Of the checkpoint's keys, those that this rank sees to it that somebody asks for.
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
    scaling: Sequence[Restored] = ()
    asked: set[str] = field(default_factory=set)
    offered: Sequence[str] = ()
    skipped: list[str] = field(default_factory=list)

    @property
    def updated(self) -> Iterator[ParameterPlan]:
        """Plans of the parameters whose optimizer state is loaded."""
        for part in self.parts if self.with_state else ():
            for _, plan in part.parameters():
                yield plan

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
    source = open_checkpoint(directory, near=[agreement.rank])
    _check_families(source, settings)  # before the model is planned: it would miss them, too
    module, include = find_fsdp_module(wanted.model), wanted.include
    everything = plan_model(module)
    source.look_near(ranks_with_copies(Mates(module), (item.plan for item in everything), agreement.rank))
    source = under_new_names(source, [item.plan for item in everything])
    own = OwnState.find(module, [item.plan for item in everything], source)
    planned = [p for p in [*everything, *own.planned] if include is None or include(p.plan.layout.key)]
    parts = optimizer_parts(grouped(wanted.optimizer), everything) if wanted.optimizer is not None else []
    opened = Opened(source, settings, module, include, planned, parts, wanted.with_state and bool(parts))
    match = _match(opened, everything=False)
    if not match.fits:
        match = _match(opened, everything=True)
    if opened.with_state:
        for part in parts:
            for plans in filter(holds_some, part.group_plans()):
                opened.hyperparameters |= source.hyperparameters(plan.layout.optimizer_name for plan in plans)
        _check_groups(opened)
    match.finish()
    opened.asked, opened.skipped = match.asked, match.skipped
    opened.offered = source.share(agreement.rank, agreement.world_size)
    opened.needed, opened.chunks = match.needed, source.chunks(sorted(match.needed), match.needed)
    check_coverage(opened.needed, opened.chunks)
    kept = own.restorations(opened.chunks, match.needed, source, verify=opened.verified)
    opened.scaling = [*restorations(module, source.states), *kept]
    if agreement.rank == 0:
        check_other_files(source.head, content=opened.verified, progress=agreement.beat)
    return opened


def _match(opened: Opened, *, everything: bool) -> Match:
    match = Match(opened.source, opened.settings, everything=everything)
    for item in opened.planned:
        match.weights(item)
    if opened.with_state:
        match.section("optimizer")
        opened.slots = {}
        for plan in opened.updated:
            opened.slots |= match.slots(plan)
    return match


def look_again(opened: Opened) -> None:
    """Where ranks do not find the same slots of a parameter: look at all of them, in the index of all ranks.

    Raises:
        KeyMismatchError: Components of a parameter have different slots.
        ManifestError: This rank's own index file has others than the index of all.
    """
    found, opened.source = opened.slots, open_checkpoint(opened.source.head.directory)
    opened.source = under_new_names(opened.source, [item.plan for item in opened.planned])
    _match(opened, everything=True).finish()
    for name, slots in found.items():
        if slots.keys() != opened.slots[name].keys():
            raise malformed(
                opened.source.head.directory,
                f"{', '.join(opened.slots[name])} of {name} in the index file of this rank, as in the others",
                ", ".join(slots),
            )


def _check_families(source: CheckpointSource, settings: Settings) -> None:
    try:
        default_registry().check_installed(source.head.families)
    except FamilyError:
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
        for names in part.group_names():
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
    if one is other:  # nearly all are: the source decodes each only once
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def records_of(opened: Opened) -> tuple[RankRecord | None, RankRecord | None]:
    """The record saved at this rank's coordinates, and one of its (pipeline, tensor) place."""
    return opened.source.near(coordinates())


def topology_of(source: CheckpointSource) -> Mapping[str, int | str]:
    """The saving job's sizes; of stock, which does not say them, those that its ranks' places tell."""
    return source.head.topology or sizes_of(record.coordinates for record in source.ranks())
