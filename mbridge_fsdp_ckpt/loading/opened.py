# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What one rank does of a load before the ranks meet: open the checkpoint, and match it with the live model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch

from mbridge_fsdp_ckpt.commit.methods import recover
from mbridge_fsdp_ckpt.coordination.coordination import Coordination
from mbridge_fsdp_ckpt.errors import ConfigurationError, FamilyError, KeyMismatchError
from mbridge_fsdp_ckpt.families import default_registry
from mbridge_fsdp_ckpt.format.names import OPTIMIZER
from mbridge_fsdp_ckpt.format.source import CheckpointSource, RankRecord, StoredChunk, sizes_of
from mbridge_fsdp_ckpt.io.files import malformed
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.live.fp8.owners import restorations
from mbridge_fsdp_ckpt.live.local_shards import KeyFilter, OptimizerPart, holds_some, optimizer_parts
from mbridge_fsdp_ckpt.live.optimizer.adapters import grouped
from mbridge_fsdp_ckpt.live.optimizer.base import STEP, Hyperparameters, SlotSpec
from mbridge_fsdp_ckpt.live.optimizer.torch_optimizer import not_of
from mbridge_fsdp_ckpt.live.planned import Planned, plan_with_parts
from mbridge_fsdp_ckpt.live.readers.choice import reader_for
from mbridge_fsdp_ckpt.live.readers.protocol import Reader
from mbridge_fsdp_ckpt.live.replicas import ranks_with_copies
from mbridge_fsdp_ckpt.loading.match import WITHOUT_STATE, LiveState, Match, check_coverage, covered
from mbridge_fsdp_ckpt.loading.own_state import OwnState
from mbridge_fsdp_ckpt.loading.renaming import under_new_names
from mbridge_fsdp_ckpt.opening import check_other_files, open_checkpoint
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.keys import STATE_PREFIX, KeyEntry
from mbridge_fsdp_ckpt.plan.slices import ParameterPlan
from mbridge_fsdp_ckpt.remedies import remedy
from mbridge_fsdp_ckpt.settings import Settings
from mbridge_fsdp_ckpt.versions import require


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a load is asked to fill.

    Args:
        model: The model, wrapped in Megatron-FSDP.
        optimizer: The optimizer over the model; None where there is none.
        include: Takes a model key and returns whether to load it; None loads all.
        weights: Whether the model gets weights and buffers.
        state: Whether the optimizer gets state.  If not, it only refreshes its copies of the weights.
    """

    model: Any
    optimizer: Any
    include: KeyFilter | None
    weights: bool
    state: bool

    @property
    def called(self) -> str:
        """The name of this kind of load in coordination and in errors."""
        return "load" if self.weights and self.state else f"load of {'weights' if self.weights else 'optimizer state'}"


class Restored(Protocol):
    """State of a module that was read and checked, and is not in place yet."""

    def apply(self) -> None:
        """Put the state in place."""


@dataclass
class Opened:
    """A checkpoint that fits this rank; its bytes are read by `fill`.

    Args:
        source: The checkpoint.
        settings: The settings of the load.
        reader: The reader of the model.
        include: Takes a model key and returns whether to load it; None loads all.
        planned: The weights and buffers to load.
        parts: The optimizers, each with the parameters whose state is loaded.
        all_parts: The optimizers, each with all of its parameters.
        with_weights: Whether weights and buffers are loaded.
        with_state: Whether optimizer state is loaded.
        chunks: Where each needed key lies.
        needed: The blocks of each key that this rank needs.
        hyperparameters: The saved hyperparameters, by the optimizer's name of a parameter.
        slots: The slots that the checkpoint has of each component, by the component's name in the optimizer's state.
        specs: The slots to fill, for each parameter.
        scaling: FP8 state, and what modules keep beside tensors.
        asked: The keys that have a place in this model.
        let_go: Keys among `asked` that only repeat another key, and are not read.
        offered: This rank's share of the checkpoint's keys.  It reports those for which no rank has a place.
        skipped: Keys that the checkpoint lacks, and is allowed to lack.
    """

    source: CheckpointSource
    settings: Settings
    reader: Reader
    include: KeyFilter | None
    planned: list[Planned]
    parts: list[OptimizerPart]
    all_parts: list[OptimizerPart]
    with_weights: bool
    with_state: bool
    chunks: dict[str, list[StoredChunk]] = field(default_factory=dict)
    needed: dict[str, list[Box]] = field(default_factory=dict)
    hyperparameters: dict[str, Hyperparameters] = field(default_factory=dict)
    slots: dict[str, dict[str, KeyEntry]] = field(default_factory=dict)
    specs: dict[ParameterPlan, dict[str, SlotSpec]] = field(default_factory=dict)
    scaling: Sequence[Restored] = ()
    asked: set[str] = field(default_factory=set)
    let_go: set[str] = field(default_factory=set)
    offered: Sequence[str] = ()
    skipped: list[str] = field(default_factory=list)

    @property
    def updated(self) -> Iterator[ParameterPlan]:
        """Plans of the parameters whose optimizer state is loaded."""
        for part in self.parts if self.with_state else ():
            for _, plan in part.parameters():
                yield plan

    def covered(self, key: str, box: Box) -> Box | None:
        """The part of a block that the load fills; None for a key that the checkpoint lacks and is allowed to lack."""
        is_read = key in self.asked and key not in self.let_go
        return covered(self.source.metadata.keys[key], box) if is_read else None

    @cached_property
    def state_prefix(self) -> str:
        """The names of outer modules that the optimizer's name of a parameter has in front of the model's key."""
        plans = (plan for part in self.all_parts for _, plan in part.parameters())
        return next((plan.layout.optimizer_name.removesuffix(plan.layout.key) for plan in plans), "")

    @property
    def verified(self) -> bool:
        """Whether every byte is checked before it is used."""
        return self.settings.verify == "full"


def open_and_match(directory: AnyPath, wanted: Wanted, settings: Settings, coordination: Coordination) -> Opened:
    """Open the checkpoint and match it with the live model.

    Raises:
        KeyMismatchError: Keys are missing, or have another shape or dtype.
        CheckpointError: The checkpoint cannot be read.
    """
    require("save and load")
    recover(directory)
    reader = reader_for(wanted.model)
    source = open_checkpoint(directory, near=[coordination.rank], plain=reader.lists_groups)
    _check_families(source, settings)  # before the model is planned: it would miss them, too
    everything = plan_with_parts(reader)[0].each()
    source.look_near(ranks_with_copies(reader.peers, (item.plan for item in everything), coordination.rank))
    source = under_new_names(source, [item.plan for item in everything])
    own = OwnState.find(reader, [item.plan for item in everything], source)
    opened = _wanted_of(source, wanted, settings, reader, everything, own)
    match = _match(opened, everything=False)
    if not match.fits:
        match = _match(opened, everything=True)
    if opened.with_state:
        _check_groups(opened)
        _check_classes(opened)
    match.finish()
    opened.asked, opened.let_go, opened.skipped = match.asked, match.let_go, match.skipped
    opened.offered = source.share(coordination.rank, coordination.world_size)
    opened.needed, opened.chunks = match.needed, source.chunks(sorted(match.needed), match.needed)
    check_coverage(opened.needed, opened.chunks)
    if opened.with_weights:
        extra = own.restorations(opened.chunks, match.needed, source, verify=opened.verified)
        opened.scaling = [*restorations(reader, source.states), *extra]
    if coordination.rank == 0:
        check_other_files(source.metadata, content=opened.verified, progress=coordination.heartbeat)
    return opened


def _wanted_of(
    source: CheckpointSource,
    wanted: Wanted,
    settings: Settings,
    reader: Reader,
    everything: list[Planned],
    own: OwnState,
) -> Opened:
    """The checkpoint with what a load is asked to fill, not matched yet, and with the saved hyperparameters."""
    include = wanted.include
    kept = [*everything, *own.planned] if wanted.weights else []
    all_parts = optimizer_parts(grouped(wanted.optimizer), everything) if wanted.optimizer is not None else []
    opened = Opened(
        source,
        settings,
        reader,
        include,
        planned=[item for item in kept if include is None or include(item.plan.layout.key)],
        parts=all_parts if include is None else [part.only(include) for part in all_parts],
        all_parts=all_parts,
        with_weights=wanted.weights,
        with_state=wanted.state and bool(all_parts),
    )
    for part in opened.parts if opened.with_state else ():
        for plans in filter(holds_some, part.group_plans()):
            opened.hyperparameters |= source.hyperparameters(plan.layout.optimizer_name for plan in plans)
    return opened


def _match(opened: Opened, *, everything: bool) -> Match:
    match = Match(opened.source, opened.settings, everything=everything)
    for item in opened.planned:
        match.weights(item)
    if opened.with_state:
        match.section("optimizer")
        opened.slots = {}
        for part in opened.parts:
            for parameter, plan in part.parameters():
                live_state = partial(_live_state, opened, part, parameter, plan)
                found, opened.specs[plan] = match.slots(plan, live_state)
                opened.slots |= found
    return match


def _live_state(
    opened: Opened, part: OptimizerPart, parameter: torch.Tensor, plan: ParameterPlan, kept_by: str | None
) -> LiveState:
    """Describe what the live optimizer keeps of a parameter, for `Match.slots`.

    Args:
        opened: The checkpoint.
        part: The optimizer of the parameter.
        parameter: The parameter.
        plan: The plan of the parameter.
        kept_by: The class that kept the saved state; None for classes whose slots are known.
    """
    counted = not plan.slices or STEP in opened.hyperparameters.get(plan.layout.optimizer_name, {})
    return LiveState(
        slots=part.adapter.expected(parameter, kept_by),
        class_name=part.adapter.class_name(parameter),
        counts_elsewhere=part.adapter.counter(parameter) is not None,
        counted=counted,
    )


def explain_differing_slots(opened: Opened) -> None:
    """Raise the error that says why ranks found different slots of a parameter, if this rank can tell.

    Each rank looked up the slots in its own index file first.  So this matches all components anew with the index of
    all ranks, and compares.  It does not change `opened`: the load fails, also where no rank raises (`DifferingSlots`).

    Raises:
        KeyMismatchError: Components of a parameter have different slots.
        ManifestError: The index file of this rank lists other slots than the index of all ranks.
    """
    slots_of_own_index, directory = opened.slots, opened.source.metadata.directory
    again = open_checkpoint(directory, plain=opened.reader.lists_groups)
    source = under_new_names(again, [item.plan for item in opened.planned])
    by_all = replace(opened, source=source, slots={}, specs={})
    _match(by_all, everything=True).finish()
    for name, slots in slots_of_own_index.items():
        if slots.keys() != by_all.slots[name].keys():
            raise malformed(
                directory,
                f"{', '.join(by_all.slots[name])} of {name} in the index file of this rank, as in the others",
                ", ".join(slots) or "no slots",
            )


def _check_families(source: CheckpointSource, settings: Settings) -> None:
    try:
        default_registry().check_installed(source.metadata.families)
    except FamilyError:
        split = {
            entry.family: key
            for key, entry in source.metadata.keys.items()
            if entry.family is not None and not settings.may_be_unexpected(key)
        }
        default_registry().check_installed(split)


def _check_groups(opened: Opened) -> None:
    """Check that the parameters of each live param group were saved with the same hyperparameters.

    Raises:
        ConfigurationError: The live optimizer groups its parameters differently.
    """
    for part in opened.parts:
        for names in part.group_names():
            saved = [name for name in names if name in opened.hyperparameters]
            for name in saved[1:]:
                first, other = opened.hyperparameters[saved[0]], opened.hyperparameters[name]
                names_of_both = (first.keys() | other.keys()) - {"param_names"}
                unlike = sorted(key for key in names_of_both if not _same(first.get(key), other.get(key)))
                if unlike:
                    raise ConfigurationError(
                        expected=f"one set of hyperparameters for the param group of {saved[0]}",
                        found=f"{name} was saved with a different {', '.join(unlike)}",
                        remedy="Build the optimizer with the param groups it was saved with.",
                    )


def _check_classes(opened: Opened) -> None:
    """Refuse hyperparameters of an optimizer of another class, where nothing but these was saved of a param group.

    Where there are slots, matching them has refused another class already.

    Raises:
        KeyMismatchError: All parameters of a param group were saved without state, by an optimizer of another class.
    """
    for part in opened.parts:
        for group, plans in zip(part.adapter.groups(), part.group_plans(), strict=True):
            names = [plan.layout.optimizer_name for plan in plans]
            saved = next((name for name in names if name in opened.hyperparameters), None)
            kept = any(opened.slots.get(plan.state_name(each)) for plan in plans for each in plan.components)
            if saved is None or kept or opened.settings.may_be_missing(f"{STATE_PREFIX}{saved}.*"):
                continue
            strange = not_of(opened.hyperparameters[saved], group.hyperparameters)
            if strange:
                raise KeyMismatchError(
                    expected=f"a checkpoint of {part.adapter.class_name(group.parameters[0])}",
                    found=f"a checkpoint of an optimizer without state, with {strange}",
                    remedy=remedy(*WITHOUT_STATE),
                    key=saved,
                )


def _same(one: object, other: object) -> bool:
    if one is other:  # nearly all are: the source decodes each only once
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def records_of(opened: Opened) -> tuple[RankRecord | None, RankRecord | None]:
    """The record saved at this rank's coordinates, and one of its (pipeline, tensor) place."""
    return opened.source.near(opened.reader.job.place)


def values_of(opened: Opened) -> Mapping[str, Any]:
    """The checkpoint's values, without the param groups that DCP metadata has of them."""
    values = opened.source.metadata.values
    if not opened.reader.lists_groups:
        return values
    return {name: value for name, value in values.items() if name != OPTIMIZER}


def topology_of(source: CheckpointSource) -> Mapping[str, int | str]:
    """The saving job's sizes; of stock, which does not say them, those that its ranks' places tell."""
    return source.metadata.topology or sizes_of(record.coordinates for record in source.ranks())
