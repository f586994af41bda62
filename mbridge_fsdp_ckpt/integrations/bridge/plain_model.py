# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A model without data-parallel sharding, in the shape in which `live.readers.megatron_fsdp` reads Megatron-FSDP.

Conversion, and Bridge's `load_megatron_model`, fill or read models that nothing wraps: each rank holds its tensor- and
expert-parallel part whole, as under Megatron-FSDP's strategy `no_shard`.  The keys on disk are the wrapped model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from mbridge_fsdp_ckpt import checkpoint
from mbridge_fsdp_ckpt.errors import ConfigurationError, KeyMismatchError
from mbridge_fsdp_ckpt.families.naming import is_expert_name
from mbridge_fsdp_ckpt.integrations.bridge.choice import settings_of
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.live.planned import plan_model
from mbridge_fsdp_ckpt.live.readers.megatron_fsdp import tensor_parallel_dim
from mbridge_fsdp_ckpt.loading.renaming import under_new_names
from mbridge_fsdp_ckpt.opening import open_checkpoint
from mbridge_fsdp_ckpt.plan.keys import MODEL_PREFIX
from mbridge_fsdp_ckpt.remedies import remedy
from mbridge_fsdp_ckpt.versions import lacking, require

OUTER, DATA, _TENSOR = "outer", "data", "tensor"
"""Dimensions of a mesh."""
_KEPT = ("tensor_model_parallel", "partition_dim", "partition_stride", "_tensor_parallel_mode")


class PlainModel:
    """What `save` and `load_weights` take for a model wrapped in Megatron-FSDP.

    Each parameter is presented as a tensor without memory, of the global shape, whose local tensor is the live one.

    Args:
        module: The model of one tensor- and expert-parallel rank; pipeline size 1.
        narrows: Present floating-point tensors as float32, so that a load may round what was saved as main weights to
            the model's own precision.
    """

    param_and_grad_buffer = None
    ddp_config = SimpleNamespace(
        data_parallel_sharding_strategy="no_shard",
        num_distributed_optimizer_instances=1,
        outer_dp_sharding_strategy="no_shard",
    )

    def __init__(self, module: Any, *, narrows: bool = False) -> None:
        require("plain models")
        self.module = module
        self._index = Index(self.ddp_config)
        self._narrows = narrows
        _annotate(module)
        parameters = {id(parameter): self._view(name, parameter) for name, parameter in module.named_parameters()}
        self._views = parameters | {id(buffer): self._without_memory(buffer) for buffer in module.buffers()}

    @property
    def config(self) -> Any:
        """Megatron's configuration of the model."""
        from megatron.core.utils import get_model_config

        return get_model_config(self.module)

    def state_dict(self, keep_vars: bool = True) -> dict[str, Any]:
        """Names as under Megatron-FSDP; tensors as they are presented."""
        state: Mapping[str, Any] = self.module.state_dict(prefix="module.", keep_vars=True)
        return {name: self._views.get(id(value), value) for name, value in state.items()}

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All parameters, as they are presented."""
        for name, parameter in self.module.named_parameters():
            yield f"module.{name}", self._views[id(parameter)]

    def buffers(self) -> Iterator[torch.Tensor]:
        """All buffers, as they are presented."""
        for buffer in self.module.buffers():
            yield self._views[id(buffer)]

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        """All modules, this one first."""
        yield "", self
        yield from self.module.named_modules(prefix="module")

    def get_distributed_index(self) -> Any:
        """Where this rank lies."""
        return self._index

    def install_optimized_model_weights(self) -> None:
        """The weights are the compute weights."""

    synchronize_param_gather = start_param_sync = install_optimized_model_weights

    def _view(self, name: str, parameter: Any) -> Any:
        shape, dim = list(parameter.shape), tensor_parallel_dim(parameter)
        if dim is not None:
            shape[dim] *= self._index.get_root_mesh(is_expert_parallel=is_expert_name(name)).mesh.shape[-1]
        view: Any = torch.nn.Parameter(self._without_memory(parameter, shape), requires_grad=False)
        for attribute in _KEPT:
            if hasattr(parameter, attribute):
                setattr(view, attribute, getattr(parameter, attribute))
        view.orig_param, view.megatron_fsdp_dist_index, view._local_tensor = parameter, self._index, parameter
        return view

    def _without_memory(self, tensor: Any, shape: list[int] | None = None) -> Any:
        dtype = self._dtype_of(tensor)
        empty: Any = torch.empty(tensor.shape if shape is None else shape, dtype=dtype, device="meta")
        empty._local_tensor = tensor
        return empty

    def _dtype_of(self, tensor: Any) -> torch.dtype:
        """What a tensor is presented as."""
        return torch.float32 if self._narrows and tensor.is_floating_point() else tensor.dtype


def load_plain(directory: AnyPath, model: list[Any], *, strict: bool = True) -> set[int]:
    """Load weights into a model that nothing wraps, rounded to its precision.

    Args:
        directory: The checkpoint.
        model: One chunk.
        strict: Whether every key of either side must be there on the other.

    Returns:
        This rank's parameters that the checkpoint lacks, by identity.

    Raises:
        ConfigurationError: Several model chunks, or one without memory.
        CheckpointError: The same on every rank; nothing was changed.
    """
    if len(model) != 1:
        raise ConfigurationError(
            expected="one model chunk", found=f"{len(model)}", remedy="Virtual pipeline stages are not supported."
        )
    if any(parameter.is_meta for parameter in model[0].parameters()):
        raise ConfigurationError(
            expected="a model with memory to load into",
            found="parameters on the meta device",
            remedy="Set model.init_model_with_meta_device=False.",
        )
    plain = PlainModel(model[0], narrows=True)
    settings = settings_of(SimpleNamespace(model=plain.config, checkpoint=SimpleNamespace(save_optim=False)))
    if strict:
        checkpoint.load_weights(directory, model=plain, settings=settings)
        return set()
    everything = (f"{MODEL_PREFIX}*",)
    missing, unexpected = (*settings.allow_missing, *everything), (*settings.allow_unexpected, *everything)
    lenient = replace(settings, allow_missing=missing, allow_unexpected=unexpected)
    absent = _absent(directory, plain)
    checkpoint.load_weights(directory, model=plain, settings=lenient)
    return absent


def _absent(directory: AnyPath, plain: PlainModel) -> set[int]:
    """Parameters of which the checkpoint lacks a component.

    Raises:
        KeyMismatchError: It has none of them.
    """
    planned = plan_model(plain)
    keys = under_new_names(open_checkpoint(directory), [item.plan for item in planned]).metadata.keys
    views = {id(view): parameter for parameter, view in _pairs(plain)}
    absent = {
        id(views[id(item.tensor)])
        for item in planned
        if id(item.tensor) in views and not all(item.plan.model_key(part) in keys for part in item.plan.components)
    }
    if len(absent) == len(views):
        raise KeyMismatchError(
            expected="a checkpoint of this model, or of a part of it",
            found=f"none of its {len(views)} parameters",
            remedy=remedy("Give a checkpoint of this model.", "It is the one that {hf_model} names."),
            key=str(directory),
        )
    return absent


def _pairs(plain: PlainModel) -> Iterator[tuple[Any, Any]]:
    """Each live parameter or buffer, and what it is presented as."""
    for tensor in (*plain.module.parameters(), *plain.module.buffers()):
        yield tensor, plain._views[id(tensor)]


def _annotate(module: Any) -> None:
    """Let Megatron-FSDP's adapter mark which dimension tensor parallelism cuts, as it does when it wraps."""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter

    # a class in 0.18 and 0.19; in 0.20 a function of that name makes one of several, which share the rule
    kinds = (kind for kind in vars(mcore_fsdp_adapter).values() if hasattr(kind, "_annotate_tensor_parallelism"))
    adapter = next(kinds, None)
    if adapter is None:
        what = f"{mcore_fsdp_adapter.__name__}.*._annotate_tensor_parallelism"
        raise lacking(what, "integrations/bridge/plain_model.py", "megatron-core")
    adapter.__new__(adapter)._annotate_tensor_parallelism(module)


class _Mesh:
    """One of the two meshes, as far as it is asked: names, ranks and this rank's place.

    Args:
        groups: This rank's groups along each dimension.  In Megatron's order of ranks a step along a group is the same
            number everywhere, so that they tell of all others.
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        self.mesh_dim_names, self._groups = tuple(groups), tuple(groups.values())
        self.mesh = own = torch.tensor(dist.get_rank(), device="cpu")
        for group in self._groups:
            ranks = torch.tensor(dist.get_process_group_ranks(group), device="cpu")
            self.mesh = self.mesh[..., None] + ranks - own

    def get_coordinate(self) -> list[int]:
        """This rank's place along each dimension."""
        return [group.rank() for group in self._groups]


class Index:
    """Stands for Megatron-FSDP's `FSDPDistributedIndex`, made of Megatron's groups.

    Args:
        config: What Megatron's `DistributedDataParallelConfig` says.
    """

    tp_dim, dp_shard_dim = _TENSOR, DATA

    def __init__(self, config: Any) -> None:
        from megatron.core import parallel_state as state

        is_hybrid = self.use_hybrid_fsdp = config.num_distributed_optimizer_instances > 1
        self.hsdp_outer_dp_shard = is_hybrid and config.outer_dp_sharding_strategy != "no_shard"
        self.dp_outer_dim = OUTER if is_hybrid else None
        outer = {OUTER: state.get_inter_distributed_optimizer_instance_group()} if is_hybrid else {}
        data = state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=is_hybrid)
        expert_data = state.get_expert_data_parallel_group(partial_expert_data_parallel=is_hybrid)
        self._dense = _Mesh(outer | {DATA: data, _TENSOR: state.get_tensor_model_parallel_group()})
        self._expert = _Mesh(outer | {DATA: expert_data, _TENSOR: state.get_expert_tensor_parallel_group()})

    def get_root_mesh(self, *, is_expert_parallel: bool) -> _Mesh:
        """The mesh of experts, or of all else."""
        return self._expert if is_expert_parallel else self._dense

    def place(self, *, expert: bool) -> dict[str, int]:
        """This rank's place along each dimension of one of them, by name."""
        mesh = self.get_root_mesh(is_expert_parallel=expert)
        return dict(zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True))
