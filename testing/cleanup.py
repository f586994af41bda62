# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Bring a worker back to where the next case may start: no process group, no Megatron globals, known seeds."""

from __future__ import annotations

import gc
import os
import random
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from testing import fresh_memory
from testing.kernels import restore_kernels

SEED = 1234

# Per module, if it was imported: what it offers to destroy its global state.  Order matters: Megatron's groups go
# before the default group that they were made from.
_MEGATRON_GLOBALS: tuple[tuple[str, str], ...] = (
    ("megatron.core.num_microbatches_calculator", "destroy_num_microbatches_calculator"),
    ("megatron.core.rerun_state_machine", "destroy_rerun_state_machine"),
    ("megatron.core.transformer.moe.moe_logging", "destroy_moe_metrics_tracker"),
    ("megatron.core.parallel_state", "destroy_global_memory_buffer"),
    ("megatron.core.parallel_state", "destroy_model_parallel"),
)


def forget_case(environment: Mapping[str, str], directory: Path) -> str | None:
    """Undo what a case did to the process; return the tracebacks of what could not be undone, if anything."""
    steps: list[Callable[[], None]] = [
        fresh_memory.restore,
        restore_kernels,
        _end_saves,
        _leave_megatron,
        _leave_process_group,
        _forget_meshes,
        _reset_torch,
        seed,
    ]
    steps.append(lambda: _reset_process(environment, directory))
    failures = []
    for step in steps:
        try:
            step()
        except Exception:  # every step is tried, all failures are reported
            failures.append(traceback.format_exc())
    return "\n".join(failures) or None


def finish_removals() -> None:
    """Wait for what the case deletes in the background: whoever asked for the case looks at directories next."""
    removal = sys.modules.get("mbridge_fsdp_ckpt.commit.removal")
    if removal is not None:
        removal.wait(60.0)


def seed() -> None:
    """Seed every generator that a case may draw from without seeding it itself."""
    random.seed(SEED)
    torch.manual_seed(SEED)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(SEED)


def _leave_megatron() -> None:
    for module_name, function in _MEGATRON_GLOBALS:
        destroy = getattr(sys.modules.get(module_name), function, None)
        if destroy is not None:
            destroy()
    megatron_random: Any = sys.modules.get("megatron.core.tensor_parallel.random")
    if megatron_random is not None:
        megatron_random._CUDA_RNG_STATE_TRACKER = None
        megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
    fp8 = getattr(sys.modules.get("transformer_engine.pytorch.quantization"), "FP8GlobalStateManager", None)
    if fp8 is not None:
        fp8.reset()


def _end_saves() -> None:
    """Let the writer of asynchronous saves end, where the case had one."""
    beside = sys.modules.get("mbridge_fsdp_ckpt.saving.background.async_saves")
    if beside is not None:
        beside.async_saves().stop()


def _leave_process_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    # An initialisation that failed half-way counted a group: the next world's ranks would not agree on names.
    torch.distributed.distributed_c10d._world.group_count = 0


def _forget_meshes() -> None:
    """Empty DTensor's caches: equal meshes of the next case would be answered with this case's dead groups."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _collective_utils, _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator._propagate_tensor_meta_cached.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()


def _reset_torch() -> None:
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    gc.collect()


def _reset_process(environment: Mapping[str, str], directory: Path) -> None:
    os.chdir(directory)
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
