# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Where a rank lies in the meshes of Megatron-FSDP, and along which of their dimensions others hold the same.

Dense parameters and experts have a mesh each; both are asked of `FSDPDistributedIndex`, and no rank is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, Literal

from mbridge_fsdp_ckpt.families.declaration import ParameterContext
from mbridge_fsdp_ckpt.families.lora import is_shared_by_experts
from mbridge_fsdp_ckpt.plan.layout import Axis

Dimension = Literal["tensor", "expert", "outer", "shard"]
"""Along which ranks of a pipeline stage are laid out."""


def replicated_along(index: Any, context: ParameterContext, *, is_cut: bool, is_whole: bool) -> list[Dimension]:
    """The dimensions along which ranks hold the very same elements of a parameter, the slowest changing first.

    Args:
        index: Megatron-FSDP's `FSDPDistributedIndex`.
        context: The parameter.
        is_cut: Whether tensor parallelism cuts it.
        is_whole: Whether each data-parallel rank holds all of it.
    """
    replicated: list[Dimension] = [] if is_cut else ["tensor"]
    if is_shared_by_experts(context):
        replicated.append("expert")
    if index.use_hybrid_fsdp and (is_whole or not index.hsdp_outer_dp_shard):
        replicated.append("outer")
    if is_whole:
        replicated.append("shard")
    return replicated


def replica_along(
    index: Any, dimensions: list[Dimension], expert_parallel: Callable[[], Axis], *, expert: bool
) -> tuple[Axis, tuple[str, ...]]:
    """This rank's place among those along some dimensions, and what the mesh calls these.

    Args:
        index: Megatron-FSDP's `FSDPDistributedIndex`.
        dimensions: The slowest changing first.
        expert_parallel: Tells this rank's place along expert parallelism, which no mesh has.
        expert: Whether it is an expert's.
    """
    names = _names_of(index)
    places = [expert_parallel() if d == "expert" else axis_of(index, names[d], expert=expert) for d in dimensions]
    return combined(places), tuple(name for d in dimensions if (name := names.get(d)) is not None)


def _names_of(index: Any) -> dict[Dimension, str | None]:
    """What the mesh calls its dimensions; experts have a mesh of their own."""
    return {"tensor": index.tp_dim, "outer": index.dp_outer_dim, "shard": index.dp_shard_dim}


def peers(fsdp_module: Any, along: tuple[str, ...], *, expert: bool, whole: bool = False) -> list[int]:
    """Global ranks that hold the very same elements, in order, this one among them; the same on each of them.

    Copies of weights that experts share, on ranks of other experts, are left out: their mesh does not name those.

    Args:
        fsdp_module: The model.
        along: A layout's `copied_along`.
        expert: Whether it is an expert's.
        whole: Whether all tensor-parallel ranks hold the same, too.
    """
    index = fsdp_module.get_distributed_index()
    mesh = index.get_root_mesh(is_expert_parallel=expert)
    free = {*along, index.tp_dim} if whole else {*along}
    places = zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True)
    found = mesh.mesh[tuple(slice(None) if name in free else at for name, at in places)]
    return sorted(found.flatten().tolist())


def axis_of(index: Any, dim_name: str | None, *, expert: bool) -> Axis:
    """This rank's place along a dimension of a mesh; alone, where there is none."""
    if dim_name is None:
        return Axis(0, 1)
    mesh = index.get_root_mesh(is_expert_parallel=expert)
    position = mesh.mesh_dim_names.index(dim_name)
    return Axis(mesh.get_coordinate()[position], mesh.mesh.size(position))


def combined(axes: list[Axis]) -> Axis:
    """This rank's place among those along several dimensions."""
    return reduce(Axis.within, axes, Axis(0, 1))
