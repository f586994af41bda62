# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""See `Reader`: a model whose parameters are torch's DTensors: FSDP2 (`fully_shard`), tensor parallelism, or both.

Where a DTensor's elements lie follows from its placements and from this rank's place in its mesh (`plan.mesh_cuts`).
What is no DTensor, such as a buffer or a parameter that `fully_shard` ignores, is whole on every rank that
holds the model (`holders`).  Names are those of torch's `get_state_dict`: without what torch.compile and activation
checkpointing put around modules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mbridge_fsdp_ckpt.errors import LayoutError, UnsupportedStateError
from mbridge_fsdp_ckpt.families.wrapping import unwrapped
from mbridge_fsdp_ckpt.live.readers.holders import Holders, place_among
from mbridge_fsdp_ckpt.live.readers.protocol import EXTRA_STATE, Job, Look, ModelParameter, Ranks
from mbridge_fsdp_ckpt.live.refusals import refuse_second_version, refuse_values
from mbridge_fsdp_ckpt.live.tensors import local_shard
from mbridge_fsdp_ckpt.plan.boxes import FlatRange, Shape
from mbridge_fsdp_ckpt.plan.layout import LAYOUT_REMEDY, Axis, BoxSet, ParameterLayout
from mbridge_fsdp_ckpt.plan.mesh_cuts import Cut, boxes_held
from mbridge_fsdp_ckpt.plan.slices import ParameterPlan
from mbridge_fsdp_ckpt.versions import require

_TAKEN = ("rank", "world", "strategy")
"""Names in the metadata that dimensions of a mesh cannot have."""


class _Canonical:
    """See `Names`."""

    def on_disk(self, name: str, root: str = "") -> str:
        """See `Names`."""
        return unwrapped(name)


class DTensorReader:
    """See `Reader`.

    Args:
        module: The model.
    """

    lists_groups = True
    naming = _Canonical()

    def __init__(self, module: torch.nn.Module) -> None:
        require("DTensors")
        self.module = module

    @classmethod
    def find(cls, model: Any) -> DTensorReader | None:
        """The reader of a model with DTensors, or on which `fully_shard` was called; None of any other.

        Raises:
            ConfigurationError: Its DTensors are those of Megatron-FSDP v2.
        """
        module = model[0] if isinstance(model, list | tuple) and len(model) == 1 else model
        if not isinstance(module, torch.nn.Module) or not _is_distributed(module):
            return None
        refuse_second_version(module)
        return cls(module)

    @cached_property
    def job(self) -> Job:
        """See `Reader`: the dimensions of the model's meshes that have names."""
        is_initialized = dist.is_initialized()
        place, sizes = {"rank": dist.get_rank() if is_initialized else 0}, dict[str, int | str]()
        for mesh in self._meshes:
            where = mesh.get_coordinate()
            for dim, name in enumerate(mesh.mesh_dim_names or ()):
                if where is not None and name not in (*_TAKEN, *sizes):
                    place[name], sizes[name] = where[dim], mesh.size(dim)
        world = dist.get_world_size() if is_initialized else 1
        return Job(place, {"world": world, **sizes, "strategy": "fully_shard" if _shards(self.module) else "DTensor"})

    def look(self) -> Look:
        """See `Reader`."""
        state = self._state
        tensors, parts = list(state.values()), list(self.module.modules())
        updated = [tensor for tensor in tensors if isinstance(tensor, torch.nn.Parameter)]
        marks: list[Any] = [
            list(state),
            [isinstance(tensor, torch.nn.Parameter) or tensor.shape for tensor in tensors],
            list(map(ref, updated)),
            [tensor.requires_grad for tensor in updated],
            [local_shard(tensor).shape for tensor in updated],
            [getattr(tensor, "placements", None) for tensor in updated],
            [None if mesh is None else ref(mesh) for mesh in map(_mesh_of, updated)],
            [name for name, _ in self.module.named_parameters()],
        ]
        return Look(tensors, parts, marks)

    def layouts(self) -> list[ModelParameter]:
        """See `Reader`."""
        first = {id(parameter): unwrapped(name) for name, parameter in self.module.named_parameters()}
        found: dict[str, ModelParameter] = {}
        for name, tensor in self._state.items():
            key = unwrapped(name)
            if key in found:
                raise LayoutError(
                    expected="one tensor for each name on disk",
                    found=f"two, of which one is called {name} in the model",
                    remedy="Rename one of them.",
                    key=key,
                )
            found[key] = ModelParameter(self._layout(key, first.get(id(tensor), ""), tensor), None, tensor)
        return list(found.values())

    def whole(self, key: str, shape: Shape) -> ParameterLayout:
        """See `Reader`."""
        ranks = self._holders.all
        flat = FlatRange(0, math.prod(shape))
        return ParameterLayout(key, "", shape, None, Axis(0, 1), flat, place_among(ranks), copied_along=ranks)

    def peers(self, plan: ParameterPlan) -> Ranks:
        """See `Reader`."""
        return tuple(rank for rank in plan.layout.copied_along if isinstance(rank, int))

    def refresh(self) -> None:
        """See `Reader`: what was gathered of the weights before is gathered anew by the next forward pass."""
        for part in self.module.modules():
            if _is_sharded(part):
                part.reshard()  # type: ignore[operator]  # of torch's FSDPModule

    @cached_property
    def _state(self) -> Mapping[str, torch.Tensor]:
        """The state dict: hooks of `fully_shard` put the sharded parameters in place.

        Raises:
            UnsupportedStateError: See `refuse_values`, `_refuse_made`.
        """
        state = self.module.state_dict(keep_vars=True)
        tensors = {name: value for name, value in state.items() if name.rpartition(".")[2] != EXTRA_STATE}
        refuse_values(tensors)
        held = {id(tensor) for tensor in (*self.module.parameters(), *self.module.buffers())}
        for name, tensor in tensors.items():
            if tensor is not None and id(tensor) not in held:
                _refuse_made(name)
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    @cached_property
    def _meshes(self) -> list[DeviceMesh]:
        meshes = map(_mesh_of, self._state.values())
        return list({id(mesh): mesh for mesh in meshes if mesh is not None}.values())

    @cached_property
    def _holders(self) -> Holders:
        return Holders(self._meshes)

    def _layout(self, key: str, optimizer_name: str, tensor: Any) -> ParameterLayout:
        mesh = _mesh_of(tensor)
        if mesh is None:
            whole = self.whole(key, tuple(tensor.shape))
            flat, replica, ranks = whole.flat, whole.replica, whole.copied_along
            box_set = None
        else:
            cuts, replicated = _cuts(tensor, mesh, key)
            box_set, flat = boxes_held(tuple(tensor.shape), cuts), FlatRange(0, 0)
            _check(box_set, tensor, key)
            ranks = self._holders.of(mesh, replicated)
            replica = place_among(ranks)
        shape = tuple(tensor.shape)
        return ParameterLayout(
            key, optimizer_name, shape, None, Axis(0, 1), flat, replica, copied_along=ranks, box_set=box_set
        )


def _is_distributed(module: torch.nn.Module) -> bool:
    return _shards(module) or any(_mesh_of(parameter) is not None for parameter in module.parameters())


def _shards(module: torch.nn.Module) -> bool:
    return any(map(_is_sharded, module.modules()))


def _is_sharded(part: torch.nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(part, FSDPModule)


def _mesh_of(tensor: torch.Tensor) -> DeviceMesh | None:
    """The mesh of a DTensor; None of any other tensor."""
    from torch.distributed.tensor import DTensor

    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def _cuts(tensor: Any, mesh: DeviceMesh, key: str) -> tuple[list[Cut], list[int]]:
    """How a mesh cuts a DTensor, and along which of its dimensions it is replicated.

    Raises:
        UnsupportedStateError: It has a placement that is neither.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    place, cuts, replicated = mesh.get_coordinate(), list[Cut](), list[int]()
    assert place is not None  # this rank holds it
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, _StridedShard):
            split = int(placement.split_factor)
            cuts.append(Cut(placement.dim % tensor.ndim, place[dim], mesh.size(dim), split))
        elif isinstance(placement, Shard):
            cuts.append(Cut(placement.dim % tensor.ndim, place[dim], mesh.size(dim)))
        elif isinstance(placement, Replicate):
            replicated.append(dim)
        else:
            raise UnsupportedStateError(
                expected="a DTensor that is sharded or replicated along each dimension of its mesh",
                found=f"placements {tensor.placements}",
                remedy="Redistribute it before it is saved or loaded.",
                key=key,
            )
    return cuts, replicated


def _check(box_set: BoxSet, tensor: torch.Tensor, key: str) -> None:
    local = tuple(local_shard(tensor).shape)
    if local != box_set.shape:
        raise LayoutError(
            expected=f"a local tensor of shape {box_set.shape}, by the placements of a DTensor of shape "
            f"{tuple(tensor.shape)}",
            found=f"one of shape {local}",
            remedy=LAYOUT_REMEDY,
            key=key,
        )


def _refuse_made(name: str) -> None:
    raise UnsupportedStateError(
        expected="the state dict to have the model's own parameters and buffers",
        found="a tensor that a hook made for it",
        remedy="Save and load the module without that hook: what it makes could not be filled.",
        key=unwrapped(name),
    )
