"""What one rank holds for a save."""

from __future__ import annotations

from collections.abc import Buffer, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast
from weakref import WeakKeyDictionary

from mbridge_fsdp_ckpt.agree import sketches
from mbridge_fsdp_ckpt.agree.sketches import Block
from mbridge_fsdp_ckpt.live.fp8.owners import own_states
from mbridge_fsdp_ckpt.live.holdings import (
    Holding,
    KeyFilter,
    OptimizerPart,
    model_holdings,
    optimizer_holdings,
    optimizer_parts,
    plan_model,
)
from mbridge_fsdp_ckpt.live.megatron_fsdp import find_fsdp_module
from mbridge_fsdp_ckpt.live.topology import coordinates, sharding_strategy, topology
from mbridge_fsdp_ckpt.plan.keys import KeyEntry, Section
from mbridge_fsdp_ckpt.plan.pieces import ParameterPlan, Piece
from mbridge_fsdp_ckpt.saving.outgoing import Elements, Outgoing
from mbridge_fsdp_ckpt.storage.checksums import Hasher
from mbridge_fsdp_ckpt.storage.files import Json
from mbridge_fsdp_ckpt.storage.format.columns import param_group_name
from mbridge_fsdp_ckpt.storage.format.own_index import RankIndex
from mbridge_fsdp_ckpt.storage.format.payload import host_pieces, numbers_bytes
from mbridge_fsdp_ckpt.storage.format.rows import Number
from mbridge_fsdp_ckpt.storage.format.schema import RankOwn
from mbridge_fsdp_ckpt.storage.format.values import encode, hash_of
from mbridge_fsdp_ckpt.versions import require


@dataclass(frozen=True, slots=True)
class Prepared:
    """What one rank is about to write, and the tensors.

    Args:
        outgoing: What it writes, without its numbers.
        holdings: The blocks with what is behind them, one for each of `Outgoing.blocks`.
        numbers: See `Outgoing`, with what is behind them.
    """

    outgoing: Outgoing
    holdings: list[Holding]
    numbers: list[Holding]

    def read(self) -> Outgoing:
        """What it writes, its numbers as they are now."""
        counts = [item.declares and item.piece.writes for item in self.numbers]
        bytes_of = numbers_bytes([item.flat for item in self.numbers])
        rows = [Number(item.key, data, own) for item, data, own in zip(self.numbers, bytes_of, counts, strict=True)]
        return replace(self.outgoing, numbers=rows)

    @property
    def is_on_device(self) -> bool:
        """Whether any of the tensors is."""
        return any(holding.flat.is_cuda for holding in self.holdings)

    @property
    def elements(self) -> Elements:
        """The tensors as they are now."""
        return _Live(self.holdings)


@dataclass(frozen=True, slots=True)
class _Live:
    """See `Elements`: read from live tensors; of a device's, no more than a piece lies on the host at a time."""

    holdings: list[Holding]

    def pieces(self, number: int) -> Iterator[Buffer]:
        """See `Elements`."""
        return host_pieces(self.holdings[number].elements())

    def digest(self, number: int) -> int:
        """See `Elements`."""
        hasher = Hasher()
        for piece in self.pieces(number):
            hasher.update(piece)
        return hasher.number()


def plan_save(
    model: Any,
    optimizer: Any,
    include: KeyFilter | None,
    rank_values: Mapping[str, Any] | None,
    vocabulary_size: int | None = None,
) -> Prepared:
    """Plan this rank's part.  No communication, and nothing of a tensor is read.

    Raises:
        CheckpointError: The model or the optimizer cannot be saved.
    """
    require("save and load")
    module = find_fsdp_module(model)
    planned = plan_model(module)
    holdings = list(model_holdings(planned, include, vocabulary_size))
    parts = optimizer_parts(optimizer, planned) if optimizer is not None else []
    slots, stateless = optimizer_holdings(parts, vocabulary_size)
    place = coordinates()
    states = own_states(module)
    parameters, param_groups, hyperparameters = _hyperparameters(parts)
    said = RankIndex(
        rank=place["rank"],
        coordinates=place,
        payload=None,
        keys={},
        parameters=parameters,
        param_groups=param_groups,
        stateless=stateless,
        states=sorted({name for kind in (states or {}).values() for name in kind}),
        own=RankOwn(values=encode(dict(rank_values or {}), "rank_values"), extra_state=encode(states, "extra_state")),
    )
    sections: tuple[Section, ...] = ("model", "optimizer") if parts else ("model",)
    numbers = [holding for holding in slots if holding.is_scalar]
    holdings += [holding for holding in slots if holding.declares]
    shape = {**topology(), "strategy": sharding_strategy(module)}
    held, known = _held(holdings, numbers), _described.get(module)
    if known is None or known.held != held:
        known = _described[module] = _describe(holdings, numbers, held)
    return Prepared(_outgoing(known, said, hyperparameters, sections, shape), holdings, numbers)


def outgoing_of(
    holdings: Sequence[Holding],
    numbers: Sequence[Holding],
    said: RankIndex,
    hyperparameters: Mapping[int, dict[str, Json]],
    sections: tuple[Section, ...],
    shape: dict[str, int | str],
) -> Outgoing:
    """What a rank writes of what it holds, without the values of numbers.

    Args:
        holdings: Its blocks that count for the plan.
        numbers: See `Outgoing`.
        said: See `Outgoing`.
        hyperparameters: See `Outgoing`.
        sections: See `Outgoing`.
        shape: `Outgoing.topology`.

    Raises:
        PlanDisagreementError: See `sketches.sketch`.
    """
    described = _describe(holdings, numbers, _held(holdings, numbers))
    return _outgoing(described, said, hyperparameters, sections, shape)


type _Held = list[tuple[str, KeyEntry, Piece, ParameterPlan]]


@dataclass(frozen=True, slots=True)
class _Description:
    """What is said of holdings, whatever their tensors are."""

    held: _Held
    blocks: list[Block]
    keys: dict[str, KeyEntry]
    sketch: list[int]


_described: WeakKeyDictionary[object, _Description] = WeakKeyDictionary()
"""By model: a later save says the same of what it still holds."""


def _held(holdings: Sequence[Holding], numbers: Sequence[Holding]) -> _Held:
    return [(item.key, item.entry, item.piece, item.plan) for part in (holdings, numbers) for item in part]


def _describe(holdings: Sequence[Holding], numbers: Sequence[Holding], held: _Held) -> _Description:
    blocks = list(map(Block.of, holdings))
    keys = {item.key: item.entry for item in holdings if item.piece.writes}
    keys |= {item.key: item.entry for item in numbers}
    return _Description(held, blocks, keys, sketches.sketch(blocks))


def _outgoing(
    known: _Description,
    said: RankIndex,
    hyperparameters: Mapping[int, dict[str, Json]],
    sections: tuple[Section, ...],
    shape: dict[str, int | str],
) -> Outgoing:
    return Outgoing(known.blocks, known.keys, [], known.sketch, said, hyperparameters, sections, shape)


def _hyperparameters(
    parts: Iterable[OptimizerPart],
) -> tuple[dict[str, int], dict[str, int], dict[int, dict[str, Json]]]:
    """Checksums of the hyperparameters of parameters that this rank tells of, of its param groups, and each encoded.

    A group of which it holds nothing says nothing: FusedAdam counts its steps where it steps something.
    """
    parameters: dict[str, int] = {}
    param_groups: dict[str, int] = {}
    known: dict[int, dict[str, Json]] = {}
    for part in parts:
        for values, plans in part.held_groups():
            encoded = cast("dict[str, Json]", encode(dict(values), "optimizer.param_to_group_meta"))
            hashed = hash_of(encoded)
            known[hashed] = encoded
            param_groups[param_group_name(plan.layout.optimizer_name for plan in plans)] = hashed
            parameters |= {plan.layout.optimizer_name: hashed for plan in plans if plan.writes_first}
    return parameters, param_groups, known
