"""What one rank holds for a save, and what it tells the others of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict, cast

from mbridge_fsdp_ckpt.agree import sketches
from mbridge_fsdp_ckpt.agree.rows import Rows
from mbridge_fsdp_ckpt.agree.sketches import Block, BlockRow
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
from mbridge_fsdp_ckpt.live.topology import coordinates, sharding_strategy
from mbridge_fsdp_ckpt.plan.keys import Section
from mbridge_fsdp_ckpt.saving import replicas
from mbridge_fsdp_ckpt.saving.replicas import Copy, CopyRow
from mbridge_fsdp_ckpt.storage.files import Json
from mbridge_fsdp_ckpt.storage.format.columns import param_group_name
from mbridge_fsdp_ckpt.storage.format.own_index import RankIndex
from mbridge_fsdp_ckpt.storage.format.schema import RankOwn
from mbridge_fsdp_ckpt.storage.format.values import encode, hash_of
from mbridge_fsdp_ckpt.versions import require


@dataclass(slots=True)
class Prepared:
    """What one rank is about to write.

    Args:
        holdings: Its blocks, those that other ranks write among them.
        numbers: The numbers of all parameters that it holds a part of, whichever rank declares them.
        sketch: What the others learn of these.
        said: What its index file says besides keys and files.
        hyperparameters: Of its parameters, encoded, by checksum.
        sections: What is saved.
        strategy: How Megatron-FSDP shards the model.
        copies: What it saw, while writing, of blocks that others hold, too.
    """

    holdings: list[Holding]
    numbers: list[Holding]
    sketch: list[int]
    said: RankIndex
    hyperparameters: dict[int, dict[str, Json]]
    sections: tuple[Section, ...]
    strategy: str
    copies: list[Copy] = field(default_factory=list)


class Announced(TypedDict):
    """A rank's message for the agreement on the plan; of several, all sections that they name."""

    sketch: list[int]
    sections: list[list[Section]]
    strategy: str


def plan_save(
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
    holdings += [holding for holding in slots if holding.declares]
    numbers = [holding for holding in slots if holding.is_scalar]
    sections: tuple[Section, ...] = ("model", "optimizer") if parts else ("model",)
    sketch = sketches.sketch(map(Block.of, holdings))
    return Prepared(holdings, numbers, sketch, said, hyperparameters, sections, sharding_strategy(module))


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


def announce(prepared: Prepared) -> Announced:
    """The bounded message for the agreement."""
    return {
        "sketch": prepared.sketch,
        "sections": [list(prepared.sections)],
        "strategy": prepared.strategy,
    }


def combine(messages: list[Announced]) -> Announced:
    """What several ranks announce, as one message."""
    return {
        "sketch": sketches.added(message["sketch"] for message in messages),
        "sections": [list(one) for one in sorted({tuple(one) for message in messages for one in message["sections"]})],
        "strategy": messages[0]["strategy"],
    }


def disputed(rank: int, prepared: Prepared, buckets: Iterable[int]) -> Rows[BlockRow]:
    """This rank's blocks in the buckets that did not add up."""
    return sketches.blocks_in(rank, map(Block.of, prepared.holdings), buckets)


def differing(rank: int, prepared: Prepared, buckets: Iterable[int]) -> Rows[CopyRow]:
    """This rank's hashes of copies in the buckets that did not add up."""
    return replicas.copies_in(rank, prepared.copies, buckets)
