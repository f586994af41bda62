"""Megatron-FSDP parameter -> `ParameterLayout`: where this rank's shard lies in the global tensor.

Nothing is asked of other ranks.  Megatron-FSDP leaves on each optimizer-named parameter what the arithmetic needs
(megatron_fsdp 0.5, `param_and_grad_buffer.py`, `_init_optimizer_named_parameters`):

    megatron_fsdp_slice        this rank's flat [start, stop) inside the parameter of one tensor-parallel rank;
                               absent with the strategy `no_shard`, where every rank holds all of it
    megatron_fsdp_dist_index   the meshes; experts have one of their own
    orig_param                 the parameter of one tensor-parallel rank: its shape
    _tensor_parallel_mode, tensor_model_parallel, partition_dim    the dimension that tensor parallelism cuts

This is the one file that reads Megatron-FSDP's attributes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mbridge_fsdp_ckpt.errors import ConfigurationError, LayoutError
from mbridge_fsdp_ckpt.families.experts import global_expert_name, is_expert_name
from mbridge_fsdp_ckpt.families.registry import ParameterContext
from mbridge_fsdp_ckpt.geometry import FlatRange, Shape


@dataclass(frozen=True, slots=True)
class Axis:
    """This rank's place along one parallel dimension."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"an axis needs 0 <= index < count, got {self.index} of {self.count}")


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """Where one parameter's local shard lies.

    Args:
        key: Name in the model's state dict, experts numbered globally.
        optimizer_name: Name in the optimizer's state dict, likewise.
        local_shape: Shape on one tensor-parallel rank.
        tensor_parallel_dim: The dimension tensor parallelism cuts; None where all its ranks hold the same.
        tensor_parallel: This rank's place along it.
        flat: The shard, as a range of the flattened tensor-parallel-local parameter.
        replica: This rank's place among those that hold the very same elements.

    Raises:
        LayoutError: The numbers contradict each other.
    """

    key: str
    optimizer_name: str
    local_shape: Shape
    tensor_parallel_dim: int | None
    tensor_parallel: Axis
    flat: FlatRange
    replica: Axis

    def __post_init__(self) -> None:
        if self.flat.stop > math.prod(self.local_shape):
            raise LayoutError(
                expected=f"a shard inside the {math.prod(self.local_shape)} elements of shape {self.local_shape}",
                found=f"elements [{self.flat.start}, {self.flat.stop})",
                remedy=_LAYOUT_REMEDY,
                key=self.key,
            )
        if self.tensor_parallel_dim is not None and not 0 <= self.tensor_parallel_dim < len(self.local_shape):
            raise LayoutError(
                expected=f"a tensor-parallel dimension of shape {self.local_shape}",
                found=f"dimension {self.tensor_parallel_dim}",
                remedy=_LAYOUT_REMEDY,
                key=self.key,
            )

    def global_shape_of(self, local_shape: Shape) -> Shape:
        """Shape over all tensor-parallel ranks of a tensor cut like this parameter."""
        if self.tensor_parallel_dim is None:
            return local_shape
        dim, count = self.tensor_parallel_dim, self.tensor_parallel.count
        return (*local_shape[:dim], local_shape[dim] * count, *local_shape[dim + 1 :])


@dataclass(frozen=True, slots=True)
class ModelParameter:
    """A layout with the tensor it describes and what a family may look at (nothing, for a buffer)."""

    layout: ParameterLayout
    context: ParameterContext | None
    tensor: torch.Tensor
    """The parameter that the optimizer updates, the main weight; or a persistent buffer."""

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard, flattened; shares memory."""
        return local_shard(self.tensor).reshape(-1)


_LAYOUT_REMEDY = (
    "The parameter's Megatron-FSDP metadata does not describe its tensor: was it replaced or resized after wrapping?"
)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, or the tensor itself; detached, shares memory."""
    return getattr(tensor, "_local_tensor", tensor).detach()


def find_fsdp_module(model: Any) -> Any:
    """The `MegatronFSDP` module inside a (wrapped) model.

    Raises:
        ConfigurationError: There is none.
    """
    module = model[0] if isinstance(model, list | tuple) and len(model) == 1 else model
    while module is not None and not hasattr(module, "param_and_grad_buffer"):
        module = getattr(module, "module", None)
    inner = getattr(module, "module", None)
    if inner is not None and hasattr(inner, "param_and_grad_buffer"):  # FullyShardedDataParallel holds MegatronFSDP
        module = inner
    if module is None:
        raise ConfigurationError(
            expected="one model chunk wrapped in Megatron-FSDP",
            found=f"{type(model).__name__}" + (f" of {len(model)}" if isinstance(model, list | tuple) else ""),
            remedy="Set ddp.use_megatron_fsdp=True; virtual pipeline stages are not supported by Megatron-FSDP.",
        )
    return module


def model_parameters(fsdp_module: Any) -> list[ModelParameter]:
    """Parameters and persistent buffers with their layouts, in the order of the model's state dict.

    `_extra_state` is left out: Megatron-FSDP rebuilds it.

    Raises:
        LayoutError: A parameter's metadata contradicts its local shard.
    """
    state = fsdp_module.state_dict(keep_vars=True)  # a hook puts the distributed parameters in place
    names = {id(parameter): name for name, parameter in fsdp_module.named_parameters()}
    modules = dict(fsdp_module.named_modules())
    first_expert = _first_expert(fsdp_module)
    parameters = []
    for state_name, tensor in state.items():
        if state_name.endswith("_extra_state") or not isinstance(tensor, torch.Tensor):
            continue
        key = global_expert_name(state_name, first_expert)
        if not isinstance(tensor, torch.nn.Parameter):
            parameters.append(ModelParameter(_buffer_layout(tensor, key, fsdp_module), None, tensor))
            continue
        name = names[id(tensor)]
        layout = _layout(tensor, key, global_expert_name(f"module.{name}", first_expert), is_expert_name(name))
        _check_against_tensor(layout, tensor)
        context = ParameterContext(name, tuple(_ancestors(name, modules)), layout.local_shape)
        parameters.append(ModelParameter(layout, context, tensor))
    return parameters


def _buffer_layout(tensor: torch.Tensor, key: str, fsdp_module: Any) -> ParameterLayout:
    """A buffer is whole on every rank that has it: all ranks, or those of its expert mesh."""
    mesh = fsdp_module.get_distributed_index().get_root_mesh(is_expert_parallel=is_expert_name(key))
    if is_expert_name(key):
        replica = _combine([Axis(i, n) for i, n in zip(mesh.get_coordinate(), mesh.mesh.shape, strict=True)])
    else:
        replica = Axis(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Axis(0, 1)
    shape = tuple(tensor.shape)
    return ParameterLayout(key, "", shape, None, Axis(0, 1), FlatRange(0, tensor.numel()), replica)


def _layout(tensor: Any, key: str, optimizer_name: str, is_expert: bool) -> ParameterLayout:
    index, shape = tensor.megatron_fsdp_dist_index, tuple(tensor.orig_param.shape)
    tensor_parallel = _axis(index, index.tp_dim, is_expert)
    dim = _tensor_parallel_dim(tensor) if tensor_parallel.count > 1 else None
    shard = getattr(tensor, "megatron_fsdp_slice", None)
    flat = FlatRange(0, math.prod(shape)) if shard is None else _flat_range(shard, key)
    replicated = [tensor_parallel] if dim is None else []
    if index.use_hybrid_fsdp and not index.hsdp_outer_dp_shard:
        replicated.append(_axis(index, index.dp_outer_dim, is_expert))
    if shard is None:
        replicated.append(_axis(index, index.dp_shard_dim, is_expert))
    return ParameterLayout(key, optimizer_name, shape, dim, tensor_parallel, flat, _combine(replicated))


def _flat_range(shard: slice, key: str) -> FlatRange:
    if shard.stop == shard.start:
        return FlatRange(0, 0)
    try:
        return FlatRange(shard.start, shard.stop)
    except ValueError as error:
        raise LayoutError(
            expected="a flat slice of the parameter", found=str(error), remedy=_LAYOUT_REMEDY, key=key
        ) from error


def _axis(index: Any, dim_name: str | None, is_expert: bool) -> Axis:
    if dim_name is None:
        return Axis(0, 1)
    mesh = index.get_root_mesh(is_expert_parallel=is_expert)
    position = mesh.mesh_dim_names.index(dim_name)
    return Axis(mesh.get_coordinate()[position], mesh.mesh.size(position))


def _combine(axes: list[Axis]) -> Axis:
    index, count = 0, 1
    for axis in axes:
        index, count = index * axis.count + axis.index, count * axis.count
    return Axis(index, count)


def _tensor_parallel_dim(tensor: Any) -> int | None:
    """The rule of megatron_fsdp `utils.py`, `get_mcore_tensor_parallel_partition_dim`."""
    match getattr(tensor, "_tensor_parallel_mode", None):
        case "column":
            return 0
        case "row":
            return 1
    dim = getattr(tensor, "partition_dim", None)
    return int(dim) if getattr(tensor, "tensor_model_parallel", False) and dim is not None and dim >= 0 else None


def _check_against_tensor(layout: ParameterLayout, tensor: Any) -> None:
    local = local_shard(tensor)
    if local.numel() != len(layout.flat):
        raise LayoutError(
            expected=f"{len(layout.flat)} local elements, [{layout.flat.start}, {layout.flat.stop}) of one TP rank",
            found=f"a local tensor of shape {tuple(local.shape)}",
            remedy=_LAYOUT_REMEDY,
            key=layout.key,
        )
    expected = layout.global_shape_of(layout.local_shape)
    if tuple(tensor.shape) != expected:
        raise LayoutError(
            expected=f"global shape {expected}: {layout.local_shape} over {layout.tensor_parallel.count} TP ranks",
            found=f"{tuple(tensor.shape)}",
            remedy=_LAYOUT_REMEDY,
            key=layout.key,
        )


def _ancestors(name: str, modules: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    path = name
    while path:
        path = path.rpartition(".")[0]
        yield path, modules[path]


def _first_expert(fsdp_module: Any) -> int:
    """Number of this rank's first expert (megatron-core `get_ep_layer_offset`)."""
    from megatron.core import parallel_state

    experts = getattr(getattr(fsdp_module, "config", None), "num_moe_experts", None)
    if not experts:
        return 0
    ranks = parallel_state.get_expert_model_parallel_world_size()
    first: int = parallel_state.get_expert_model_parallel_rank() * (experts // ranks)
    return first
