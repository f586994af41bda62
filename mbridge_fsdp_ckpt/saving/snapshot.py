# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What one rank holds for a save."""

from __future__ import annotations

from collections.abc import Buffer, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from mbridge_fsdp_ckpt.coverage import plans as fingerprints
from mbridge_fsdp_ckpt.coverage.plans import Block
from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.format.columns import param_group_name
from mbridge_fsdp_ckpt.format.names import OPTIMIZER, PARAM_GROUPS
from mbridge_fsdp_ckpt.format.own_index import RankIndex
from mbridge_fsdp_ckpt.format.rows import Scalar
from mbridge_fsdp_ckpt.format.schema import RankOwn
from mbridge_fsdp_ckpt.format.values import encode, encode_mapping, hash_of
from mbridge_fsdp_ckpt.io.checksums import Hasher
from mbridge_fsdp_ckpt.io.files import Json
from mbridge_fsdp_ckpt.io.host_bytes import fetched, pieces_of
from mbridge_fsdp_ckpt.live.fp8.owners import own_states
from mbridge_fsdp_ckpt.live.local_shards import (
    KeyFilter,
    LocalShard,
    OptimizerPart,
    holds_some,
    model_shards,
    optimizer_parts,
    optimizer_shards,
)
from mbridge_fsdp_ckpt.live.optimizer import loss_scales
from mbridge_fsdp_ckpt.live.optimizer.adapters import grouped, kept_tensors, may_be_replayed, refuse_global_state
from mbridge_fsdp_ckpt.live.optimizer.base import Grouped
from mbridge_fsdp_ckpt.live.planned import Planned, PlannedTensors, plan_with_parts
from mbridge_fsdp_ckpt.live.readers.choice import reader_for
from mbridge_fsdp_ckpt.live.readers.protocol import Reader
from mbridge_fsdp_ckpt.live.watched import Watched
from mbridge_fsdp_ckpt.plan.keys import KeyEntry, Section
from mbridge_fsdp_ckpt.plan.slices import ParameterPlan, Slice
from mbridge_fsdp_ckpt.saving.own_state import own_state
from mbridge_fsdp_ckpt.saving.write_plan import Elements, WritePlan
from mbridge_fsdp_ckpt.versions import require


@dataclass(frozen=True, slots=True)
class Prepared:
    """What one rank is about to write, and the tensors.

    Args:
        write_plan: The write plan of this rank, without scalars.
        shards: The blocks with what is behind them, one for each of `WritePlan.blocks`.
        numbers: The scalars of all parameters that it holds a part of, with what is behind them.
        values: The values of `Observed`.
        watched: All of these tensors, if training continues during the copy.
    """

    write_plan: WritePlan
    shards: list[LocalShard]
    numbers: list[LocalShard]
    values: Mapping[str, Any]
    watched: Watched | None = None

    def read(self) -> WritePlan:
        """What it writes, its numbers as they are now.

        Raises:
            ChangedTensorError: A tensor has changed, or was replaced, since the call of the save.
        """
        counts = [item.declares and item.slice_.writes for item in self.numbers]
        read = zip(self.numbers, fetched([item.flat for item in self.numbers]), counts, strict=True)
        rows = [Scalar(item.key, data.tobytes(), own) for item, data, own in read]
        for item in self.numbers:
            _check(item, self.watched)
        return replace(self.write_plan, numbers=rows)

    @property
    def elements(self) -> Elements:
        """The tensors as they are now."""
        return _Live(self.shards, self.watched)

    def check(self, number: int) -> None:
        """Of one of the local shards, once it is copied.

        Raises:
            ChangedTensorError: A tensor has changed, or was replaced, since the call of the save.
        """
        _check(self.shards[number], self.watched)


def _check(shard: LocalShard, watched: Watched | None) -> None:
    if watched is not None and shard.kept is not None:
        watched.check(shard.kept, shard.key)


@dataclass(frozen=True, slots=True)
class _Live:
    """See `Elements`: read from live tensors."""

    shards: list[LocalShard]
    watched: Watched | None

    def each(self, numbers: Sequence[int]) -> Iterator[Iterable[Buffer]]:
        """See `Elements`."""
        return pieces_of(self.shards[number].elements() for number in numbers)

    def digests(self, numbers: Sequence[int]) -> Iterator[int]:
        """See `Elements`."""
        for number, slices in zip(numbers, self.each(numbers), strict=True):
            hasher = Hasher()
            for slice_ in slices:
                hasher.update(slice_)
            _check(self.shards[number], self.watched)
            yield hasher.number()


@dataclass(frozen=True, slots=True)
class Observed:
    """What is to be saved, seen at the call.

    Args:
        reader: The reader of the model.
        tensors: The parameters and buffers of the model.
        own: The state that modules keep beside parameters and buffers.
        optimizers: The optimizers with their param groups; empty if none is saved.
        hyperparameters: Encoded, of each of their param groups.
        values: The values that are saved, with loss scales and param groups.
        rank_values: The values of this rank alone, encoded.
        states: The FP8 state of this rank's modules, encoded, and the names of these modules.
        include: Takes a model key and returns whether to save it; None saves all.
        vocabulary_size: Rows of the vocabulary without its padding, where known.
        optimizer: Megatron's optimizer, or a torch optimizer; None where no state is saved.
        watched: The tensors that are read later, as they are at the call; None where the save waits.
    """

    reader: Reader
    tensors: PlannedTensors
    own: list[Planned]
    optimizers: list[Grouped]
    hyperparameters: list[dict[str, Json]]
    values: Mapping[str, Any]
    rank_values: Json
    states: tuple[Json, list[str]]
    include: KeyFilter | None
    vocabulary_size: int | None
    optimizer: Any
    watched: Watched | None = None

    def with_buffers_copied(self) -> Observed:
        """The same with copies of buffers; all other tensors are watched from now on."""
        tensors = self.tensors.with_buffers_copied()
        of_optimizer = kept_tensors(self.optimizer) if self.optimizer is not None else ()
        own = (planned.tensor for planned in self.own)
        return replace(self, tensors=tensors, watched=Watched(chain(tensors.tensors, own, of_optimizer)))

    @property
    def may_be_replayed(self) -> bool:
        """See `adapters.may_be_replayed`."""
        return may_be_replayed(self.optimizer)


def observe(
    model: Any,
    optimizer: Any,
    include: KeyFilter | None,
    rank_values: Mapping[str, Any] | None,
    values: Mapping[str, Any] | None = None,
    vocabulary_size: int | None = None,
) -> Observed:
    """See what is to be saved.  No communication, and nothing of a tensor is read.

    Args:
        model: Wrapped in Megatron-FSDP.
        optimizer: Megatron's optimizer, or a torch optimizer; None where no state is saved.
        include: Takes a model key and returns whether to save it; None saves all.
        rank_values: State of this rank alone, by name.
        values: Non-tensor state that is the same on all ranks, by name.
        vocabulary_size: Rows of the vocabulary without its padding, where known.

    Raises:
        CheckpointError: The model or the optimizer cannot be saved.
    """
    require("save and load")
    reader = reader_for(model)
    if optimizer is not None:
        refuse_global_state(optimizer)
        loss_scales.check_name(values, optimizer)
    tensors, modules = plan_with_parts(reader)
    optimizers = grouped(optimizer) if optimizer is not None else []
    states = own_states(reader, modules)
    return Observed(
        reader=reader,
        tensors=tensors,
        own=own_state(reader, modules, (plan for plan, _ in tensors.plans)),
        optimizers=optimizers,
        hyperparameters=_encoded(optimizers),
        values=_with_param_groups(loss_scales.with_loss_scales(values, optimizer), reader, tensors, optimizers),
        rank_values=encode_mapping(rank_values or {}, "rank_values"),
        states=(encode(states, "extra_state"), sorted({name for kind in (states or {}).values() for name in kind})),
        include=include,
        vocabulary_size=vocabulary_size,
        optimizer=optimizer,
    )


def _with_param_groups(
    values: Mapping[str, Any], reader: Reader, tensors: PlannedTensors, optimizers: Iterable[Grouped]
) -> Mapping[str, Any]:
    """Values, and the param groups where `Reader.lists_groups`, as torch's `get_state_dict` gives them.

    Raises:
        ConfigurationError: A value has their name.
    """
    groups = [group for optimizer in optimizers for group in optimizer.groups]
    if not (reader.lists_groups and groups):
        return values
    if OPTIMIZER in values:
        raise ConfigurationError(
            expected=f"values without {OPTIMIZER!r}, under which the param groups of the optimizer are saved",
            found="one",
            remedy="Give it another name.",
        )
    named = zip(tensors.plans, tensors.tensors, strict=True)
    names = {id(tensor): plan.layout.optimizer_name for (plan, _), tensor in named}
    listed = [
        {**group.hyperparameters, "params": [names.get(id(parameter), "") for parameter in group.parameters]}
        for group in groups
    ]
    return {**values, OPTIMIZER: {PARAM_GROUPS: listed}}


def plan_save(observed: Observed) -> Prepared:
    """Plan this rank's part, before an optimizer steps.  No communication, and nothing of a tensor is read.

    Raises:
        CheckpointError: The model or the optimizer cannot be saved.
    """
    planned = observed.tensors.each() + observed.own
    parts = optimizer_parts(observed.optimizers, planned)
    shards = list(model_shards(planned, observed.include, observed.vocabulary_size))
    slots, stateless = optimizer_shards(parts, observed.vocabulary_size)
    sections: tuple[Section, ...] = ("model", "optimizer") if parts else ("model",)
    numbers = [shard for shard in slots if shard.is_scalar]
    shards += [shard for shard in slots if shard.declares]
    held, known = _held(shards, numbers), _described.get(observed.reader.module)
    if known is None or known.held != held:
        known = _described[observed.reader.module] = _describe(shards, numbers, held)
    of_parameters, of_groups, encoded = _hyperparameters(parts, observed.hyperparameters)
    extra_state, names = observed.states
    said = RankIndex(
        rank=observed.reader.job.place["rank"],
        coordinates=observed.reader.job.place,
        payload=None,
        keys={},
        parameters=of_parameters,
        stateless=stateless,
        states=names,
        own=RankOwn(values=observed.rank_values, extra_state=extra_state),
        param_groups=of_groups,
    )
    write_plan = _write_plan(known, said, encoded, sections, observed.reader.job.sizes)
    return Prepared(write_plan, shards, numbers, observed.values, observed.watched)


def write_plan_of(
    shards: Sequence[LocalShard],
    numbers: Sequence[LocalShard],
    said: RankIndex,
    hyperparameters: Mapping[int, dict[str, Json]],
    sections: tuple[Section, ...],
    shape: dict[str, int | str],
) -> WritePlan:
    """What a rank writes of what it holds, without the values of numbers.

    Args:
        shards: The blocks of this rank that count for the plan.
        numbers: The scalars of all parameters that it holds a part of.
        said: The content of the rank's index file besides keys, files and times.
        hyperparameters: The hyperparameters of the rank's parameters, encoded, by checksum.
        sections: The sections to save: model, or model and optimizer.
        shape: `WritePlan.topology`.

    Raises:
        PlanDisagreementError: This rank would write a tensor twice.
    """
    described = _describe(shards, numbers, _held(shards, numbers))
    return _write_plan(described, said, hyperparameters, sections, shape)


type _Held = list[tuple[str, KeyEntry, Slice, ParameterPlan]]


@dataclass(frozen=True, slots=True)
class _Description:
    """What is said of local shards, whatever their tensors are."""

    held: _Held
    blocks: list[Block]
    keys: dict[str, KeyEntry]
    fingerprint: list[int]


_described: WeakKeyDictionary[object, _Description] = WeakKeyDictionary()
"""By model: a later save says the same of what it still holds."""


def _held(shards: Sequence[LocalShard], numbers: Sequence[LocalShard]) -> _Held:
    return [(item.key, item.entry, item.slice_, item.plan) for part in (shards, numbers) for item in part]


def _describe(shards: Sequence[LocalShard], numbers: Sequence[LocalShard], held: _Held) -> _Description:
    blocks = list(map(Block.of, shards))
    keys = {item.key: item.entry for item in shards if item.slice_.writes}
    keys |= {item.key: item.entry for item in numbers}
    return _Description(held, blocks, keys, fingerprints.fingerprint(blocks))


def _write_plan(
    known: _Description,
    said: RankIndex,
    hyperparameters: Mapping[int, dict[str, Json]],
    sections: tuple[Section, ...],
    shape: dict[str, int | str],
) -> WritePlan:
    return WritePlan(known.blocks, known.keys, [], known.fingerprint, said, hyperparameters, sections, shape)


def _encoded(optimizers: Iterable[Grouped]) -> list[dict[str, Json]]:
    """Hyperparameters of every param group, as they are now: a scheduler changes them."""
    groups = (group for optimizer in optimizers for group in optimizer.groups)
    return [encode_mapping(group.hyperparameters, "optimizer.param_to_group_meta") for group in groups]


class _Hyperparameters(NamedTuple):
    """Those that a rank tells of.

    Args:
        of_parameters: Checksums, by parameter.
        of_groups: Checksums, by param group.
        encoded: By checksum.
    """

    of_parameters: dict[str, int]
    of_groups: dict[str, int]
    encoded: dict[int, dict[str, Json]]


def _hyperparameters(parts: Iterable[OptimizerPart], of_groups: Iterable[dict[str, Json]]) -> _Hyperparameters:
    """A group of which a rank holds nothing says nothing: FusedAdam counts its steps where it steps something."""
    found = _Hyperparameters({}, {}, {})
    plans_of = (plans for part in parts for plans in part.group_plans())
    for plans, encoded in zip(plans_of, of_groups, strict=True):
        if holds_some(plans):
            hashed = hash_of(encoded)
            found.encoded[hashed] = encoded
            found.of_groups[param_group_name(plan.layout.optimizer_name for plan in plans)] = hashed
            found.of_parameters.update((plan.layout.optimizer_name, hashed) for plan in plans if plan.writes_first)
    return found
