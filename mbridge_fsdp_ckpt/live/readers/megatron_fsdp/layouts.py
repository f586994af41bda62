# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Megatron-FSDP parameter -> `ParameterLayout`: where this rank's shard lies in the global tensor.

Nothing is asked of other ranks.  Megatron-FSDP leaves on each optimizer-named parameter what the arithmetic needs
(megatron_fsdp 0.5, `param_and_grad_buffer.py`, `_init_optimizer_named_parameters`):

    megatron_fsdp_slice        this rank's flat [start, stop) inside the parameter of one tensor-parallel rank;
                               absent with the strategy `no_shard`, where every rank holds all of it
    megatron_fsdp_dist_index   the meshes; experts have one of their own
    orig_param                 the parameter of one tensor-parallel rank: its shape; a DTensor where torch's own tensor
                               parallelism cut it: of the global shape, its local tensor is that rank's
    _tensor_parallel_mode, tensor_model_parallel, partition_dim    the dimension that Megatron-Core's cuts

This file and `live.mesh` alone read Megatron-FSDP's attributes; `structure` compares them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from mbridge_fsdp_ckpt.errors import ConfigurationError, LayoutError
from mbridge_fsdp_ckpt.families.declaration import ParameterContext
from mbridge_fsdp_ckpt.families.naming import Naming, is_expert_name
from mbridge_fsdp_ckpt.families.wrapping import innermost, unwrapped, unwrapped_modules
from mbridge_fsdp_ckpt.live.context import context_of, is_vocabulary
from mbridge_fsdp_ckpt.live.mesh import axis_of, combined, replica_along, replicated_along
from mbridge_fsdp_ckpt.live.readers.megatron_fsdp import parallel
from mbridge_fsdp_ckpt.live.readers.protocol import EXTRA_STATE, ModelParameter
from mbridge_fsdp_ckpt.live.refusals import described, refuse_second_version, refuse_strangers, refuse_values
from mbridge_fsdp_ckpt.live.tensors import local_shard
from mbridge_fsdp_ckpt.plan.boxes import FlatRange, Shape
from mbridge_fsdp_ckpt.plan.layout import LAYOUT_REMEDY, Axis, ParameterLayout
from mbridge_fsdp_ckpt.remedies import remedy
from mbridge_fsdp_ckpt.versions import probe


def find_fsdp_module(model: Any) -> Any:
    """The `MegatronFSDP` module inside a (wrapped) model.

    Raises:
        ConfigurationError: There is none, or one of Megatron-FSDP v2.
    """
    module = module_in(model)
    if module is None:
        refuse_second_version(model)
        raise ConfigurationError(
            expected="one model chunk wrapped in Megatron-FSDP",
            found=described(model),
            remedy=remedy(
                "Wrap the model in it.", "Set {megatron_fsdp}.", "Virtual pipeline stages are not supported."
            ),
        )
    return module


def module_in(model: Any) -> Any:
    """The same, or None where there is none."""
    module = innermost(model[0] if isinstance(model, list | tuple) and len(model) == 1 else model)
    while module is not None and not hasattr(module, "param_and_grad_buffer"):
        module = innermost(getattr(module, "module", None))
    inner = innermost(getattr(module, "module", None))
    if inner is not None and hasattr(inner, "param_and_grad_buffer"):  # FullyShardedDataParallel holds MegatronFSDP
        module = inner
    if module is not None:
        probe("a MegatronFSDP module", module)
    return module


def tensors_of(fsdp_module: Any) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, in the order of the model's state dict.

    What `get_extra_state` returned is left out; see `live.fp8` and `live.own_state`.

    Raises:
        ConfigurationError: A parameter came to the model after it was wrapped, or took the place of another.
        UnsupportedStateError: The state dict has something that is no tensor.
    """
    refuse_strangers(fsdp_module, both_parameters(fsdp_module))
    state = fsdp_module.state_dict(keep_vars=True)  # a hook puts the distributed parameters in place
    extra = {name: value for name, value in state.items() if name.rpartition(".")[2] == EXTRA_STATE}
    registered = {id(buffer) for buffer in fsdp_module.buffers()} if extra else ()
    tensors = {name: value for name, value in state.items() if name not in extra or id(value) in registered}
    refuse_values(tensors)
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def both_parameters(fsdp_module: Any) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
    """By name, the parameters that the optimizer updates, and those that compute: of each, one is in its module.

    Nothing where Megatron-FSDP keeps no such lists.
    """
    updated = getattr(fsdp_module.param_and_grad_buffer, "optimizer_named_parameters", ())
    return dict(updated), getattr(fsdp_module, "raw_param", {})


def model_parameters(fsdp_module: Any) -> list[ModelParameter]:
    """What `tensors_of` finds, with layouts.

    Raises:
        LayoutError: A parameter's metadata contradicts its local shard.
    """
    state = tensors_of(fsdp_module)
    names = {id(parameter): unwrapped(name) for name, parameter in fsdp_module.named_parameters()}
    modules = unwrapped_modules(fsdp_module.named_modules())
    naming, root = naming_of(fsdp_module), _root(state, names)
    parameters = []
    for state_name, tensor in state.items():
        key, is_copy = naming.on_disk(state_name, root), naming.is_copy(state_name, root)
        if not isinstance(tensor, torch.nn.Parameter):
            parameters.append(
                ModelParameter(whole_layout(tuple(tensor.shape), key, fsdp_module, naming.stages), None, tensor)
            )
            continue
        probe("a parameter of Megatron-FSDP", tensor)
        name = names[id(tensor)]
        fsdp_parameter: Any = tensor
        context = context_of(name, modules, fsdp_parameter.orig_param)
        layout = replace(
            _layout(tensor, key, f"module.{naming.on_disk(name)}", context),
            is_copy=is_copy,
            is_vocabulary=is_vocabulary(context),
        )
        _check_against_tensor(layout, tensor)
        parameters.append(ModelParameter(layout, context, tensor))
    _check_names(parameters)
    return parameters


def naming_of(module: Any) -> Naming:
    """Names on disk of what a model holds on this rank."""
    return Naming(unwrapped_modules(module.named_modules()), parallel.expert_rank(), parallel.stages())


def _root(state: dict[str, Any], names: dict[int, str]) -> str:
    """The module from which names in the state dict start: Megatron's precision wrapper hides itself there."""
    for state_name, tensor in state.items():
        name, below = names.get(id(tensor), ""), f".{unwrapped(state_name)}"
        if name.endswith(below):
            return name.removesuffix(below)
    return ""


def _check_names(parameters: list[ModelParameter]) -> None:
    seen: set[str] = set()
    for parameter in parameters:
        key = parameter.layout.key
        if key in seen:
            raise LayoutError(
                expected="one parameter for each name on disk",
                found="two parameters with the same name",
                remedy="Check whether two layers have the same layer_number.",
                key=key,
            )
        seen.add(key)


def whole_layout(shape: Shape, key: str, fsdp_module: Any, stages: int) -> ParameterLayout:
    """A buffer is whole on every rank that has it: all ranks of a stage, or those of its expert mesh."""
    mesh = fsdp_module.get_distributed_index().get_root_mesh(is_expert_parallel=is_expert_name(key))
    if is_expert_name(key) or stages > 1:
        replica = combined([Axis(i, n) for i, n in zip(mesh.get_coordinate(), mesh.mesh.shape, strict=True)])
    else:
        replica = Axis(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Axis(0, 1)
    flat, along = FlatRange(0, math.prod(shape)), tuple(mesh.mesh_dim_names)
    return ParameterLayout(key, "", shape, None, Axis(0, 1), flat, replica, copied_along=along)


def _layout(tensor: Any, key: str, optimizer_name: str, context: ParameterContext) -> ParameterLayout:
    index, shape = tensor.megatron_fsdp_dist_index, context.local_shape
    is_expert = is_expert_name(context.name)
    tensor_parallel = axis_of(index, index.tp_dim, expert=is_expert)
    dim = tensor_parallel_dim(tensor) if tensor_parallel.count > 1 else None
    shard = getattr(tensor, "megatron_fsdp_slice", None)
    flat = FlatRange(0, math.prod(shape)) if shard is None else _flat_range(shard, key)
    is_whole = shard is None or not math.prod(shape)
    replicated = replicated_along(index, context, is_cut=dim is not None, is_whole=is_whole)
    replica, along = replica_along(index, replicated, parallel.expert_axis, expert=is_expert)
    return ParameterLayout(key, optimizer_name, shape, dim, tensor_parallel, flat, replica, copied_along=along)


def _flat_range(shard: slice, key: str) -> FlatRange:
    if shard.stop == shard.start:
        return FlatRange(0, 0)
    try:
        return FlatRange(shard.start, shard.stop)
    except ValueError as error:
        raise LayoutError(
            expected="a flat slice of the parameter", found=str(error), remedy=LAYOUT_REMEDY, key=key
        ) from error


def tensor_parallel_dim(tensor: Any) -> int | None:
    """The dimension that is cut, if one is.

    The rules of megatron_fsdp `param_and_grad_buffer.py`, `_get_fsdp_tensor_spec`, for a parameter that is a DTensor,
    and of its `utils.py`, `get_mcore_tensor_parallel_partition_dim`, for Megatron-Core's.
    """
    for placement in getattr(getattr(tensor, "orig_param", None), "placements", ()):
        if placement.is_shard():
            return int(placement.dim)
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
            remedy=LAYOUT_REMEDY,
            key=layout.key,
        )
    expected = layout.global_shape_of(layout.local_shape)
    if tuple(tensor.shape) != expected:
        raise LayoutError(
            expected=f"global shape {expected}: {layout.local_shape} over {layout.tensor_parallel.count} TP ranks",
            found=f"{tuple(tensor.shape)}",
            remedy=LAYOUT_REMEDY,
            key=layout.key,
        )
