# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Where Megatron-FSDP would cut a model's parameters, by its own arithmetic: the one file here that knows its inside.

It packs parameters into buckets and cuts each over the data-parallel ranks (megatron_fsdp 0.5,
`param_and_grad_buffer.py`).  What decides a cut is metadata, so that tensors without memory will do.

    bucket of three parameters, 4 ranks      a a a a | a b b b | b b b c | c c . .      . is padding
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from mbridge_fsdp_ckpt.plan.boxes import FlatRange
from mbridge_fsdp_ckpt.tools.estimate.layout import JobLayout
from mbridge_fsdp_ckpt.versions import require

_UNITS = ("TransformerLayer", "MoETransformerLayer", "MambaLayer")
"""Layers that are buckets of their own where parameters are sharded; those that the adapter of this version knows."""


@dataclass(frozen=True, slots=True)
class Item:
    """One parameter in its bucket, as Megatron-FSDP's functions know it.

    Args:
        index: Its number in the bucket.
        places: Where the bucket's parameters begin, by number.
        bucket: The bucket: its size, with padding.
        ranks: Over how many ranks it is cut.
    """

    index: int
    places: dict[int, Any]
    bucket: Any
    ranks: int

    def slice_of(self, rank: int) -> slice:
        """This parameter's elements on one of these ranks, in the flattened parameter."""
        from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as buffer

        shard = buffer._get_dp_buffer_shard_bucket_index(self.bucket, True, self.ranks, rank)
        seen = SimpleNamespace(item_index_map=self.places, shard_bucket_index=shard)
        return slice(*buffer.DataParallelBuffer._get_item_slice_in_shard(seen, self.index))

    @property
    def place(self) -> tuple[int, int, int]:
        """All that decides where it is cut, besides its size: where it begins, the bucket's size, the ranks."""
        return self.places[self.index].global_data_index, self.bucket.size, self.ranks

    def parts(self) -> Iterator[tuple[int, FlatRange]]:
        """Ranks that hold some of it, with what they hold."""
        begin, size, ranks = self.place
        shard = size // ranks
        end = begin + self.places[self.index].size
        for rank in range(begin // shard, (end - 1) // shard + 1) if end > begin else ():
            held = self.slice_of(rank)
            yield rank, FlatRange(held.start, held.stop)


class Sharding:
    """The buckets of one model.

    Args:
        module: The module that Megatron-FSDP would wrap.
        layout: The job's.
        bucket_size: Megatron's setting; None for one bucket of all that is in no layer.
    """

    def __init__(self, module: Any, layout: JobLayout, bucket_size: int | None = None) -> None:
        require("estimate")
        from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as buffer

        self.layout = layout
        policy = buffer.BucketingPolicy(bucket_size, _units(layout), layout.strategy)
        groups, _, _ = buffer._get_parameter_groups(module, policy, {})
        config = SimpleNamespace(data_parallel_sharding_strategy=layout.strategy)
        self._items: dict[int, Item] = {}
        for number, group in enumerate(groups):
            ranks = self._ranks(expert=group.is_expert_param)
            shapes = [parameter.shape for parameter in group.params]
            places, bucket, _ = buffer.build_data_parallel_buffer_index(
                shapes, 0, ranks, True, config, number, group.chunk_size_factor
            )
            for index, parameter in enumerate(group.params):
                self._items[id(parameter)] = Item(index, places, bucket, ranks)

    def item(self, parameter: Any) -> Item | None:
        """A parameter's place; None where every rank holds all of it."""
        return None if self.layout.strategy == "no_shard" else self._items[id(parameter)]

    def _ranks(self, *, expert: bool) -> int:
        ranks = self.layout.expert_data if expert else self.layout.data
        return ranks if self.layout.shards_outer else ranks // self.layout.instances


def shard_rank(outer: int, shard: int, layout: JobLayout) -> int:
    """A rank's number among those that a bucket is cut over, by its coordinates (`get_logical_hybrid_fsdp_rank`)."""
    return shard * layout.instances + outer if layout.shards_outer else shard


def _units(layout: JobLayout) -> list[Any]:
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter

    if layout.strategy != "optim_grads_params":
        return []
    return [getattr(mcore_fsdp_adapter, name) for name in _UNITS if hasattr(mcore_fsdp_adapter, name)]
