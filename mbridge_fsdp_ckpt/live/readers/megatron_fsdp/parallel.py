# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Megatron's parallel state: the sizes of the running job, and this rank's place in it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch.distributed as dist

from mbridge_fsdp_ckpt.plan.layout import Axis


def topology() -> dict[str, int | str]:
    """Parallel sizes, by name."""
    sizes: dict[str, int | str] = {"world": dist.get_world_size() if dist.is_initialized() else 1}
    state = _parallel_state()
    if state is not None:
        sizes |= {
            "tensor": state.get_tensor_model_parallel_world_size(),
            "pipeline": state.get_pipeline_model_parallel_world_size(),
            "context": state.get_context_parallel_world_size(),
            "expert": state.get_expert_model_parallel_world_size(),
            "expert_tensor": state.get_expert_tensor_parallel_world_size(),
            "data": state.get_data_parallel_world_size(),
        }
    return sizes


def coordinates() -> dict[str, int]:
    """This rank's place along each parallel dimension."""
    place = {"rank": dist.get_rank() if dist.is_initialized() else 0}
    state = _parallel_state()
    if state is not None:
        place |= {
            "tensor": state.get_tensor_model_parallel_rank(),
            "pipeline": state.get_pipeline_model_parallel_rank(),
            "context": state.get_context_parallel_rank(),
            "expert": state.get_expert_model_parallel_rank(),
            "data": state.get_data_parallel_rank(),
        }
    return place


def expert_axis() -> Axis:
    """This rank's place along expert parallelism."""
    state = _parallel_state()
    if state is None:
        return Axis(0, 1)
    return Axis(state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size())


def expert_rank() -> int:
    """Expert-parallel rank."""
    state = _parallel_state()
    return 0 if state is None else int(state.get_expert_model_parallel_rank())


def stages() -> int:
    """Pipeline-parallel size."""
    state = _parallel_state()
    return 1 if state is None else int(state.get_pipeline_model_parallel_world_size())


def sharding_strategy(module: Any) -> str:
    """Data-parallel sharding strategy of a `MegatronFSDP` module, the outer one after a slash if it is hybrid.

    Megatron-Core 0.20 may have another one for experts, after a comma.
    """
    config = module.ddp_config
    experts = getattr(config, "data_parallel_sharding_strategy_experts", None)
    outer = f"/{config.outer_dp_sharding_strategy}" if config.num_distributed_optimizer_instances > 1 else ""
    other = f", experts {experts}" if experts not in (None, config.data_parallel_sharding_strategy) else ""
    return f"{config.data_parallel_sharding_strategy}{outer}{other}"


def _parallel_state() -> ModuleType | None:
    from megatron.core import parallel_state

    return parallel_state if parallel_state.model_parallel_is_initialized() else None
