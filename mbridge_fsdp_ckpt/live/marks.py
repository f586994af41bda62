"""What a plan was made from, as values to compare: whether a model is as it was costs a tenth of planning it again.

Of tensors these are what `megatron_fsdp` reads of them; of modules (`parts`) what names are made from, and which
modules they are.  Nothing is kept alive: a module that died equals no other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist

from mbridge_fsdp_ckpt.families.registry import default_registry

_OF_PARAMETERS = "megatron_fsdp_slice", "_tensor_parallel_mode", "tensor_model_parallel", "partition_dim"
_OF_ORIGINALS = "partition_stride", "partition_sizes"


class Marks(NamedTuple):
    """Tensors as they were.

    Args:
        parameters: The parameters among them.  What one of them is for good is not asked again: its shape, say.
        columns: See `_columns`.
    """

    parameters: list[ref[Any]]
    columns: list[Any]

    def fit(self, state: Mapping[str, torch.Tensor]) -> bool:
        """Whether tensors are as they were: these parameters, and buffers like those that there were.

        Args:
            state: See `marks_of_tensors`.
        """
        parameters = _parameters(state)
        return (
            len(parameters) == len(self.parameters)
            and all(map(is_, [parameter() for parameter in self.parameters], parameters))
            and _columns(state, parameters) == self.columns
        )


def marks_of_tensors(state: Mapping[str, torch.Tensor]) -> Marks:
    """What a plan of these tensors depends on, beside the modules that they lie in (`parts`).

    Args:
        state: Parameters and persistent buffers of a `MegatronFSDP` module.
    """
    parameters = _parameters(state)
    return Marks(list(map(ref, parameters)), _columns(state, parameters))


def _parameters(state: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in state.values() if "orig_param" in vars(tensor)]


def _columns(state: Mapping[str, torch.Tensor], parameters: Sequence[Any]) -> list[Any]:
    """What is asked of the job, and of each tensor; a list an attribute."""
    own = list(map(vars, parameters))
    originals = [vars(of["orig_param"]) for of in own]
    return [
        (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1),
        _parallel(),
        default_registry().families,
        list(state),
        [None if "orig_param" in vars(tensor) else tensor.shape for tensor in state.values()],
        [getattr(parameter, "_local_tensor", parameter).numel() for parameter in parameters],
        [parameter.requires_grad for parameter in parameters],
        [ref(of["megatron_fsdp_dist_index"]) for of in own],
        *([of.get(name) for of in own] for name in _OF_PARAMETERS),
        *([of.get(name) for of in originals] for name in _OF_ORIGINALS),
    ]


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
