# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Random plans of random jobs, damaged at random, and by counting elements whether each is still written once."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from mbridge_fsdp_ckpt.coverage.buckets import added
from mbridge_fsdp_ckpt.coverage.plans import Block, DisputedPlans, fingerprint
from mbridge_fsdp_ckpt.errors import PlanDisagreementError
from mbridge_fsdp_ckpt.format.columns import Columns
from mbridge_fsdp_ckpt.format.group_index import merged
from mbridge_fsdp_ckpt.format.names import Files
from mbridge_fsdp_ckpt.format.own_index import RankIndex, own_index
from mbridge_fsdp_ckpt.format.rows import Chunk, Row, Scalar
from mbridge_fsdp_ckpt.io.ranges import ByteRange
from mbridge_fsdp_ckpt.live.local_shards import LocalShard
from mbridge_fsdp_ckpt.plan.boxes import Box, FlatRange, whole
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.plan.layout import Axis, ParameterLayout
from mbridge_fsdp_ckpt.plan.slices import plan_parameter
from tests.unit.rounds import met

Plans = list[list[Block]]
"""By rank."""

MAX_RANKS = 24


def plans_of_a_job(rng: random.Random) -> Plans:
    """What the ranks of one job plan for a few tensors, some of which only some ranks hold."""
    shards, tensor, instances = rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 2)
    plans: Plans = [[] for _ in range(shards * tensor * instances)]
    for number in range(rng.randint(1, 3)):
        draw = rng.choice((_parameter, _parameter, _buffer, _tied))
        for rank, layout in draw(rng, f"layers.{number}.weight", (shards, tensor, instances)):
            plans[rank] += blocks_of(layout, with_step=number == 0)
    return plans


def blocks_of(layout: ParameterLayout, *, with_step: bool) -> list[Block]:
    """Blocks of a weight, and of a scalar beside it."""
    plan, blocks = plan_parameter(layout, None), []
    for slice_ in plan.slices:
        entry = KeyEntry(dtype="float32", shape=slice_.component.global_shape)
        blocks.append(Block.of(LocalShard(plan.model_key(slice_.component), entry, slice_, None, plan)))  # type: ignore[arg-type]
        if with_step and slice_.is_origin and not layout.is_copy:
            step = KeyEntry(dtype="float32", shape=(), kind="tensor")
            blocks.append(Block.of(LocalShard(f"{layout.key}.step", step, slice_, None, plan)))  # type: ignore[arg-type]
    return blocks


def _shape(rng: random.Random) -> tuple[int, ...]:
    return tuple(
        rng.choice((0, 1, 2, 3, 4, 5) if rng.random() < 0.2 else (1, 2, 3, 4)) for _ in range(rng.randint(1, 3))
    )


def _parameter(rng: random.Random, key: str, sizes: tuple[int, int, int]) -> list[tuple[int, ParameterLayout]]:
    """Cut over data-parallel shards, cut or copied over tensor-parallel ranks, copied over instances."""
    shards, tensor, instances = sizes
    shape, dim = _shape(rng), None
    if tensor > 1 and rng.random() < 0.6:
        dim = rng.randrange(len(shape))
    elements = int(np.prod(shape))
    cuts = [0, *sorted(rng.randint(0, elements) for _ in range(shards - 1)), elements]
    found = []
    for rank in range(shards * tensor * instances):
        shard, place, instance = rank % shards, rank // shards % tensor, rank // shards // tensor
        replica = (
            Axis(instance, instances) if dim is not None else Axis(instance, instances).within(Axis(place, tensor))
        )
        if not elements:
            replica = replica.within(Axis(shard, shards))
        flat = FlatRange(cuts[shard], cuts[shard + 1])
        found.append((rank, ParameterLayout(key, key, shape, dim, Axis(place, tensor), flat, replica)))
    return found


def _buffer(rng: random.Random, key: str, sizes: tuple[int, int, int]) -> list[tuple[int, ParameterLayout]]:
    """Whole on every rank; now and then on some alone, whether the one that is to write it is among them or not."""
    ranks, shape = int(np.prod(sizes)), _shape(rng)
    holders = range(ranks) if rng.random() < 0.6 else sorted(rng.sample(range(ranks), rng.randint(1, ranks)))
    flat = FlatRange(0, int(np.prod(shape)))
    return [(rank, ParameterLayout(key, "", shape, None, Axis(0, 1), flat, Axis(rank, ranks))) for rank in holders]


def _tied(rng: random.Random, key: str, sizes: tuple[int, int, int]) -> list[tuple[int, ParameterLayout]]:
    """Held once by the first ranks, and by the last as a later stage's copy; either may be missing."""
    ranks, shape = int(np.prod(sizes)), _shape(rng)
    flat = FlatRange(0, int(np.prod(shape)))
    layout = ParameterLayout(key, key, shape, None, Axis(0, 1), flat, Axis(0, 1))
    copy = (ranks - 1, replace(layout, is_copy=True))
    return [copy] if rng.random() < 0.1 else [(0, layout), copy] if ranks > 1 else [(0, layout)]


Damage = Callable[[random.Random, Plans], None]


def _some(rng: random.Random, plans: Plans) -> tuple[int, int]:
    rank = rng.choice([rank for rank, blocks in enumerate(plans) if blocks])
    return rank, rng.randrange(len(plans[rank]))


def lose_a_block(rng: random.Random, plans: Plans) -> None:
    rank, number = _some(rng, plans)
    del plans[rank][number]


def double_a_block(rng: random.Random, plans: Plans) -> None:
    rank, number = _some(rng, plans)
    plans[rng.randrange(len(plans))].append(plans[rank][number])


def give_a_block_away(rng: random.Random, plans: Plans) -> None:
    """Harmless: it is written once, by another rank."""
    rank, number = _some(rng, plans)
    plans[rng.randrange(len(plans))].append(plans[rank].pop(number))


def move_a_block(rng: random.Random, plans: Plans) -> None:
    rank, number = _some(rng, plans)
    block = plans[rank][number]
    room = [n - size for n, size in zip(block.shape, block.box.size, strict=True)]
    offset = tuple(rng.randint(0, free) for free in room)
    plans[rank][number] = replace(block, box=Box(offset, block.box.size))


def change_who_writes(rng: random.Random, plans: Plans) -> None:
    rank, number = _some(rng, plans)
    block = plans[rank][number]
    plans[rank][number] = replace(block, writes=not block.writes)


def lose_a_key_on_a_rank(rng: random.Random, plans: Plans) -> None:
    rank, number = _some(rng, plans)
    plans[rank][:] = [block for block in plans[rank] if block.key != plans[rank][number].key]


def lose_a_replica(rng: random.Random, plans: Plans) -> None:
    rank, number = _some(rng, plans)
    lost = plans[rank][number]
    for blocks in plans:
        blocks[:] = [block for block in blocks if (block.key, block.replica) != (lost.key, lost.replica)]


def double_a_key(rng: random.Random, plans: Plans) -> None:
    """Another set of ranks holds the tensor and does not know of the first."""
    rank, number = _some(rng, plans)
    key = plans[rank][number].key
    twice = [[block for block in blocks if block.key == key] for blocks in plans]
    shift = rng.randrange(len(plans))
    for rank, blocks in enumerate(twice):
        plans[(rank + shift) % len(plans)] += blocks


def change_the_count_of_replicas(rng: random.Random, plans: Plans) -> None:
    rank, number = _some(rng, plans)
    block = plans[rank][number]
    plans[rank][number] = replace(block, replica=Axis(block.replica.index, block.replica.count + rng.randint(1, 3)))


def change_the_replica(rng: random.Random, plans: Plans) -> None:
    rank, number = _some(rng, plans)
    block = plans[rank][number]
    plans[rank][number] = replace(block, replica=Axis(rng.randrange(block.replica.count), block.replica.count))


def change_the_dtype(rng: random.Random, plans: Plans) -> None:
    rank, number = _some(rng, plans)
    plans[rank][number] = replace(plans[rank][number], dtype="bfloat16")


def change_the_shape(rng: random.Random, plans: Plans) -> None:
    rank, number = _some(rng, plans)
    block = plans[rank][number]
    plans[rank][number] = replace(block, shape=tuple(n + rng.randint(0, 2) for n in block.shape))


DAMAGES: tuple[Damage, ...] = (
    lose_a_block,
    double_a_block,
    give_a_block_away,
    move_a_block,
    change_who_writes,
    lose_a_key_on_a_rank,
    lose_a_replica,
    double_a_key,
    change_the_count_of_replicas,
    change_the_replica,
    change_the_dtype,
    change_the_shape,
)


def is_written_once(plans: Plans) -> bool:
    """Whether each element of each planned key is written by one rank, and all mean the same tensor: by counting."""
    tensors: dict[str, set[Any]] = defaultdict(set)
    written: dict[str, list[Block]] = defaultdict(list)
    for block in (block for blocks in plans for block in blocks):
        tensors[block.key].add((block.dtype, block.kind, block.shape))
        if block.writes:
            written[block.key].append(block)
    return all(len(tensor) == 1 and _counts(written[key]) for key, tensor in tensors.items())


def _counts(blocks: list[Block]) -> bool:
    if not blocks:
        return False
    shape = blocks[0].shape
    if 0 in shape:
        return len(blocks) == 1
    times = np.zeros(shape, int)
    for block in blocks:
        times[block.box.slices_in(whole(shape))] += 1
    return bool((times == 1).all())


def _row(block: Block) -> Row:
    if block.kind == "sharded":
        return Chunk(block.key, block.box, ByteRange(0, 0), 0, block.nbytes, 0)
    return Scalar(block.key, bytes(dtype_from_name(block.dtype).itemsize))


def _index_of(rank: int, blocks: list[Block]) -> Columns:
    """The index of what a rank writes, without its bytes."""
    written = {(block.key, block.box): block for block in blocks if block.writes}.values()
    keys = {block.key: KeyEntry(dtype=block.dtype, shape=block.shape, kind=block.kind) for block in written}
    rows = [_row(block) for block in written]
    return own_index(RankIndex(rank, {"rank": rank}, None, keys), rows, Files("0" * 32, ".distcp"))


def refusal(plans: Plans) -> str:
    """The meetings of a save about a plan, as data that passed through the store; why it is refused, or nothing."""
    try:
        sums = added(json.loads(json.dumps([fingerprint(blocks) for blocks in plans])))
        if any(sums):
            met([DisputedPlans(rank, blocks, sums, lambda: None) for rank, blocks in enumerate(plans)])
        merged([_index_of(rank, blocks) for rank, blocks in enumerate(plans)])
    except PlanDisagreementError as error:
        return str(error)
    return ""
