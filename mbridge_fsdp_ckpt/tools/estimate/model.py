# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A model that nothing wraps and that has no memory, as Megatron-FSDP's reader would find it on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from mbridge_fsdp_ckpt.integrations.bridge.plain_model import PlainModel
from mbridge_fsdp_ckpt.live.readers.megatron_fsdp import local_shard
from mbridge_fsdp_ckpt.tools.estimate.layout import DENSE, EXPERT, JobLayout, coordinates
from mbridge_fsdp_ckpt.tools.estimate.shards import Sharding, shard_rank
from mbridge_fsdp_ckpt.tools.estimate.slots import Slots


@dataclass(frozen=True, slots=True)
class Subject:
    """What is estimated, of one pipeline stage.

    Args:
        module: The module that Megatron-FSDP would wrap, of the stage's first rank; all its ranks have such a one.
        sharding: How Megatron-FSDP would cut it.
        main_dtype: Of main weights; None where a parameter is its own.
        slots: What the optimizer keeps.
        vocabulary_size: Rows of the vocabulary without its padding, where known.
    """

    module: Any
    sharding: Sharding
    main_dtype: torch.dtype | None
    slots: Slots
    vocabulary_size: int | None = None

    @property
    def layout(self) -> JobLayout:
        """The job's."""
        return self.sharding.layout


class EstimatedModel(PlainModel):
    """What `live.planned.plan_model` takes for a model wrapped in Megatron-FSDP, on one rank.

    Args:
        subject: The model.
        rank: A rank of its stage.
    """

    def __init__(self, subject: Subject, rank: int) -> None:
        self._subject, self._place = subject, RankIndex(subject.layout, rank)
        subject.module.state_dict()  # routers turn biases to fp32 on this occasion
        super().__init__(subject.module)
        layout = subject.layout
        self.ddp_config = SimpleNamespace(
            data_parallel_sharding_strategy=layout.strategy,
            num_distributed_optimizer_instances=layout.instances,
            outer_dp_sharding_strategy=layout.outer,
        )

    def _make_index(self) -> Any:
        return self._place

    def _dtype_of(self, tensor: Any) -> torch.dtype:
        main = self._subject.main_dtype
        is_trained = isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad
        return main if main is not None and is_trained else tensor.dtype

    def _view(self, name: str, parameter: Any) -> Any:
        view = super()._view(name, parameter)
        item, count = self._subject.sharding.item(parameter), parameter.numel()
        if item is not None:
            view.megatron_fsdp_slice = held = item.slice_of(self._place.shard_rank(expert=".experts." in f".{name}"))
            count = held.stop - held.start
        view._local_tensor = torch.empty(count, dtype=view.dtype, device="meta")
        view.requires_grad_(parameter.requires_grad)
        return view


class RankIndex:
    """Stands for Megatron-FSDP's `FSDPDistributedIndex` on one rank."""

    tp_dim, dp_shard_dim = "tensor", "shard"

    def __init__(self, layout: JobLayout, rank: int) -> None:
        stage = rank // layout.stage_world
        self._layout = layout
        self._meshes = [Mesh(layout, rank, stage, expert=expert) for expert in (False, True)]
        self.use_hybrid_fsdp, self.hsdp_outer_dp_shard = layout.is_hybrid, layout.shards_outer
        self.dp_outer_dim = "outer" if layout.is_hybrid else None

    def get_root_mesh(self, *, is_expert_parallel: bool) -> Mesh:
        """The mesh of experts, or of all else."""
        return self._meshes[is_expert_parallel]

    def shard_rank(self, *, expert: bool) -> int:
        """This rank among those over which a bucket is cut."""
        outer, shard, _ = self._meshes[expert].get_coordinate()
        return shard_rank(outer, shard, self._layout)


class Mesh:
    """One of the two meshes, as far as it is asked: names, sizes and this rank's place."""

    mesh_dim_names = DENSE

    def __init__(self, layout: JobLayout, rank: int, stage: int, *, expert: bool) -> None:
        ranks = layout.mesh(expert=expert, stage=stage)
        place = dict(zip(EXPERT if expert else DENSE, coordinates(ranks, rank), strict=True))
        sizes = dict(zip(EXPERT if expert else DENSE, ranks.shape, strict=True))
        self._place = [place[name] for name in DENSE]
        self.mesh = torch.empty([sizes[name] for name in DENSE], device="meta")

    def get_coordinate(self) -> list[int]:
        """This rank's place along each dimension."""
        return self._place


def optimizer_over(subject: Subject, model: EstimatedModel) -> torch.optim.Optimizer | None:
    """An optimizer over an estimated model, with the state that the real one would have; None where it has none."""
    if not subject.slots:
        return None
    trained = [parameter for _, parameter in model.named_parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.0)
    for parameter in trained:
        count = local_shard(parameter).numel()
        optimizer.state[parameter] = {
            name: torch.empty((count,) if spec.kind == "sharded" else (), dtype=spec.dtype, device="meta")
            for name, spec in subject.slots.items()
        }
    return optimizer
