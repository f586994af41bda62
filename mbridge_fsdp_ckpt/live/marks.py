"""What a plan was made from, as values to compare: whether a model is as it was costs a tenth of planning it again.

Of tensors these are what `megatron_fsdp` reads of them; of modules (`parts`) what names are made from, and which
modules they are.  Nothing is kept alive: a module that died equals no other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from weakref import ref

import torch
import torch.distributed as dist

from mbridge_fsdp_ckpt.families.registry import default_registry

type Marks = list[object]

_OF_PARAMETERS = "megatron_fsdp_slice", "_tensor_parallel_mode", "tensor_model_parallel", "partition_dim"
_OF_ORIGINALS = "partition_stride", "partition_sizes"


def marks_of_tensors(state: Mapping[str, torch.Tensor]) -> Marks:
    """What a plan of these tensors depends on, beside the modules that they lie in (`parts`).

    Args:
        state: Parameters and persistent buffers of a `MegatronFSDP` module.
    """
    place = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    first: dict[int, int] = {}  # tied tensors have one name in the optimizer
    marks: Marks = [place, _parallel(), default_registry().families]
    for number, (name, tensor) in enumerate(state.items()):
        own, local = vars(tensor), getattr(tensor, "_local_tensor", tensor)
        marks.extend((name, first.setdefault(id(tensor), number), tensor.shape, local.numel()))
        if "orig_param" in own:
            original, index = own["orig_param"], own["megatron_fsdp_dist_index"]
            whole = getattr(original, "_local_tensor", original)
            marks.extend((whole.shape, getattr(original, "placements", None), ref(index)))
            marks.extend((tensor.dtype, tensor.requires_grad))
            marks.extend((*map(own.get, _OF_PARAMETERS), *map(vars(original).get, _OF_ORIGINALS)))
    return marks


def _parallel() -> tuple[int, ...]:
    from megatron.core import parallel_state as state

    if not state.model_parallel_is_initialized():
        return ()
    asked: tuple[Callable[[], int], ...] = (
        state.get_expert_model_parallel_rank,
        state.get_expert_model_parallel_world_size,
        state.get_pipeline_model_parallel_world_size,
    )
    return tuple(ask() for ask in asked)
