# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""How a job is laid out, and which rank sits where: integers alone.

Ranks are numbered as Megatron does, tensor-parallel ones first.  Megatron-FSDP sees two meshes of a pipeline stage's
ranks (megatron_fsdp adapter, `_get_hsdp_tp_mesh`): of experts, and of all else.

    8 ranks, TP 2, EP 2         dense (outer, shard, tensor)        experts (outer, shard, expert, expert tensor)
        rank 5                  (0, 2, 1)                           (0, 2, 1, 0)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from mbridge_fsdp_ckpt.errors import ConfigurationError

Strategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
Outer = Literal["no_shard", "optim"]
Ranks = npt.NDArray[np.int64]

MOST_RANKS = 16_384
DENSE = ("outer", "shard", "tensor")
EXPERT = ("outer", "shard", "expert", "tensor")
"""Dimensions of the two meshes, the slowest changing first; the experts' tensor parallelism is their own."""


@dataclass(frozen=True, slots=True)
class JobLayout:
    """Parallel sizes of a job.

    Args:
        world: Ranks.
        tensor: Tensor-parallel size.
        pipeline: Pipeline stages.
        context: Context-parallel size.
        expert: Expert-parallel size.
        expert_tensor: Tensor-parallel size of experts.
        instances: Copies of the sharded optimizer; more than one is hybrid sharding.
        outer: What hybrid sharding shards over those copies.
        strategy: What is sharded over data-parallel ranks.

    Raises:
        ConfigurationError: The sizes do not fit each other.
    """

    world: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    instances: int = 1
    outer: Outer = "no_shard"
    strategy: Strategy = "optim_grads_params"

    def __post_init__(self) -> None:
        if not 1 <= self.world <= MOST_RANKS:
            raise _unfit(f"1 to {MOST_RANKS:,} ranks", f"{self.world:,}", "Change --world.")
        dense = self.tensor * self.pipeline * self.context
        self._check_divides(dense, f"--tp {self.tensor} --pp {self.pipeline} --cp {self.context}")
        experts = self.expert * self.expert_tensor * self.pipeline
        self._check_divides(experts, f"--ep {self.expert} --etp {self.expert_tensor} --pp {self.pipeline}")
        for what, size in (("data-parallel", self.data), ("expert data-parallel", self.expert_data)):
            if size % self.instances:
                raise _unfit(f"--outer {self.instances} to divide the {what} size", str(size), "Change --outer.")
        if self.outer != "no_shard" and self.instances > 1 and self.strategy != "optim_grads_params":
            raise _unfit(
                "--strategy optim_grads_params with --outer-strategy optim", self.strategy, "Megatron-FSDP refuses it."
            )

    def _check_divides(self, size: int, said: str) -> None:
        if self.world % size:
            least = size * max(1, round(self.world / size))
            raise _unfit(f"a number of ranks that {said} divides", f"{self.world:,}", f"Try --world {least}.")

    @property
    def is_hybrid(self) -> bool:
        """Whether there is an outer dimension."""
        return self.instances > 1

    @property
    def shards_outer(self) -> bool:
        """Whether parameters are sharded over it, too."""
        return self.is_hybrid and self.outer != "no_shard"

    @property
    def stage_world(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world // self.pipeline

    @property
    def data(self) -> int:
        """Ranks over which Megatron-FSDP spreads what is not an expert's: data- and context-parallel ones."""
        return self.stage_world // self.tensor

    @property
    def expert_data(self) -> int:
        """Ranks over which it spreads experts."""
        return self.stage_world // (self.expert * self.expert_tensor)

    def cut_over(self, *, expert: bool) -> int:
        """Ranks over which a bucket is cut."""
        ranks = self.expert_data if expert else self.data
        return ranks if self.shards_outer else ranks // self.instances

    def shard_rank(self, outer: int, shard: int) -> int:
        """A rank's number among these, by its coordinates (Megatron-FSDP's `get_logical_hybrid_fsdp_rank`)."""
        return shard * self.instances + outer if self.shards_outer else shard

    def mesh(self, *, expert: bool, stage: int = 0) -> Ranks:
        """The ranks of a stage, by their coordinates along `EXPERT` or `DENSE`."""
        inside = (self.expert, self.expert_tensor) if expert else (self.tensor,)
        first = stage * self.stage_world
        ranks = np.arange(first, first + self.stage_world)
        return ranks.reshape(self.instances, -1, *inside)

    def replica_groups(self, along: Sequence[str], *, expert: bool, stage: int = 0) -> Ranks:
        """Ranks by their place in their replica group, data-parallel rank, expert-parallel rank, tensor-parallel rank.

        Args:
            along: The dimensions along which ranks hold the same, the slowest changing first.
            expert: Which mesh.
            stage: The stage.
        """
        mesh, names = self.mesh(expert=expert, stage=stage), EXPERT if expert else DENSE
        data = ("shard", "outer") if self.shards_outer else ("outer", "shard")
        axes = [[names.index(name) for name in along]]
        for dimensions in (data, ("expert",), ("tensor",)):
            axes.append([names.index(name) for name in dimensions if name in names and name not in along])
        shape = [math.prod(mesh.shape[axis] for axis in some) for some in axes]
        return mesh.transpose([axis for some in axes for axis in some]).reshape(shape)

    @property
    def said(self) -> str:
        """In words."""
        sizes = {
            "TP": self.tensor,
            "PP": self.pipeline,
            "CP": self.context,
            "EP": self.expert,
            "ETP": self.expert_tensor,
        }
        named = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        outer = [f"{self.instances} x {self.outer}"] if self.is_hybrid else []
        return ", ".join([f"{self.world:,} ranks", *named, self.strategy, *outer])


def check_experts(layout: JobLayout, experts: int) -> None:
    """Whether expert parallelism can spread so many experts.

    Raises:
        ConfigurationError: It can't.
    """
    if layout.expert > 1 and (not experts or experts % layout.expert):
        what = f"{experts} experts" if experts else "a model without experts"
        raise _unfit(
            f"an expert-parallel size that divides the model's experts, not --ep {layout.expert}", what, "Change --ep."
        )


def _unfit(expected: str, found: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(expected=expected, found=found, remedy=remedy)
