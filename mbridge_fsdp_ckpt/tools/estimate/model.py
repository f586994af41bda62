# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A model without memory, as Megatron-FSDP's reader would find it on any rank of a job, in a process that is alone.

Megatron-FSDP packs parameters into buckets and cuts each over the data-parallel ranks (megatron_fsdp 0.5,
`param_and_grad_buffer.py`).  Its own functions are called here: what decides a cut is metadata, so that tensors without
memory will do.

    bucket of three parameters, 4 ranks      a a a a | a b b b | b b b c | c c . .      . is padding
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.families.naming import is_expert_name
from mbridge_fsdp_ckpt.integrations.bridge.plain_model import DATA, OUTER, PlainModel
from mbridge_fsdp_ckpt.live.optimizer.base import SlotSpec
from mbridge_fsdp_ckpt.live.tensors import local_shard
from mbridge_fsdp_ckpt.plan.boxes import FlatRange
from mbridge_fsdp_ckpt.tools.estimate.layout import JobLayout
from mbridge_fsdp_ckpt.versions import require

_UNITS = ("TransformerLayer", "MoETransformerLayer", "MambaLayer")
"""Layers that are buckets of their own where parameters are sharded; those that the adapter of this version knows."""

Slots = dict[str, SlotSpec]
"""What an optimizer keeps of a parameter, by name."""


@contextmanager
def as_rank(layout: JobLayout, rank: int) -> Iterator[None]:
    """Be this rank of the job while the body runs: in torch's process group that sends nothing, and Megatron's groups.

    Raises:
        ConfigurationError: This process is a rank already.
    """
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ConfigurationError(
            expected="a process of its own for an estimate",
            found="a process group",
            remedy="Run it outside of a training job, without torchrun.",
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            num_distributed_optimizer_instances=layout.instances,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@contextmanager
def as_expert_rank(rank: int) -> Iterator[None]:
    """Be another expert-parallel rank while the body runs, as far as names are concerned."""
    from megatron.core import parallel_state

    own = parallel_state.get_expert_model_parallel_rank()
    parallel_state.set_expert_model_parallel_rank(rank)
    try:
        yield
    finally:
        parallel_state.set_expert_model_parallel_rank(own)


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

    def held_by(self, rank: int) -> FlatRange:
        """This parameter's elements on one of these ranks, in the flattened parameter."""
        from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as buffer

        shard = buffer._get_dp_buffer_shard_bucket_index(self.bucket, True, self.ranks, rank)
        seen = SimpleNamespace(item_index_map=self.places, shard_bucket_index=shard)
        return FlatRange(*buffer.DataParallelBuffer._get_item_slice_in_shard(seen, self.index))

    @property
    def place(self) -> tuple[int, int, int]:
        """All that decides where it is cut, besides its size: where it begins, the bucket's size, the ranks."""
        return self.places[self.index].global_data_index, self.bucket.size, self.ranks

    def parts(self) -> Iterator[tuple[int, FlatRange]]:
        """Ranks that hold some of it, with what they hold."""
        begin, size, ranks = self.place
        shard, end = size // ranks, begin + self.places[self.index].size
        for rank in range(begin // shard, (end - 1) // shard + 1) if end > begin else ():
            yield rank, self.held_by(rank)


class Subject:
    """What is estimated, of one pipeline stage.

    Args:
        module: The module that Megatron-FSDP would wrap, of the stage's first rank; all its ranks have such a one.
        layout: The job's layout.
        main_dtype: Of main weights; None where a parameter is its own.
        slots: What the optimizer keeps.
        bucket_size: Megatron's setting; None for one bucket of all that is in no layer.
        vocabulary_size: Rows of the vocabulary without its padding, where known.
    """

    def __init__(
        self,
        module: Any,
        layout: JobLayout,
        main_dtype: torch.dtype | None,
        slots: Slots,
        bucket_size: int | None = None,
        vocabulary_size: int | None = None,
    ) -> None:
        require("estimate")
        self.module, self.layout, self.main_dtype, self.slots = module, layout, main_dtype, slots
        self.vocabulary_size = vocabulary_size
        self._items = dict(_items(module, layout, bucket_size))
        module.state_dict()  # routers turn biases to fp32 on this occasion

    def item(self, parameter: Any) -> Item | None:
        """A parameter's place in its bucket; None where every data-parallel rank holds all of it."""
        return None if self.layout.strategy == "no_shard" else self._items[id(parameter)]


def _items(module: Any, layout: JobLayout, bucket_size: int | None) -> Iterator[tuple[int, Item]]:
    """Every parameter's place, by its identity."""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as buffer

    units = [getattr(mcore_fsdp_adapter, name) for name in _UNITS if hasattr(mcore_fsdp_adapter, name)]
    is_by_layer = layout.strategy == "optim_grads_params"
    policy = buffer.BucketingPolicy(bucket_size, units if is_by_layer else [], layout.strategy)
    groups, _, _ = buffer._get_parameter_groups(module, policy, {})
    config = SimpleNamespace(data_parallel_sharding_strategy=layout.strategy)
    for number, group in enumerate(groups):
        ranks = layout.cut_over(expert=group.is_expert_param)
        shapes = [parameter.shape for parameter in group.params]
        places, bucket, _ = buffer.build_data_parallel_buffer_index(
            shapes, 0, ranks, True, config, number, group.chunk_size_factor
        )
        for index, parameter in enumerate(group.params):
            yield id(parameter), Item(index, places, bucket, ranks)


class EstimatedModel(PlainModel):
    """What a save takes for a model wrapped in Megatron-FSDP, on the rank that this process passes for.

    Args:
        subject: The model, of that rank's stage.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject, layout = subject, subject.layout
        self.ddp_config = SimpleNamespace(
            data_parallel_sharding_strategy=layout.strategy,
            num_distributed_optimizer_instances=layout.instances,
            outer_dp_sharding_strategy=layout.outer,
        )
        super().__init__(subject.module)

    def _dtype_of(self, tensor: Any) -> torch.dtype:
        main = self._subject.main_dtype
        is_trained = isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad
        return main if main is not None and is_trained else tensor.dtype

    def _view(self, name: str, parameter: Any) -> Any:
        view = super()._view(name, parameter)
        item, count = self._subject.item(parameter), parameter.numel()
        if item is not None:
            place = self._index.place(expert=is_expert_name(name))
            held = item.held_by(self._subject.layout.shard_rank(place.get(OUTER, 0), place[DATA]))
            view.megatron_fsdp_slice, count = slice(held.start, held.stop), len(held)
        view._local_tensor = torch.empty(count, dtype=view.dtype, device="meta")
        view.requires_grad_(parameter.requires_grad)
        return view

    def optimizer(self) -> torch.optim.Optimizer | None:
        """An optimizer over this model, with the state that the real one would have; None where it has none."""
        if not self._subject.slots:
            return None
        trained = [parameter for _, parameter in self.named_parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.0)
        for parameter in trained:
            count = local_shard(parameter).numel()
            optimizer.state[parameter] = {
                name: torch.empty((count,) if spec.kind == "sharded" else (), dtype=spec.dtype, device="meta")
                for name, spec in self._subject.slots.items()
            }
        return optimizer
