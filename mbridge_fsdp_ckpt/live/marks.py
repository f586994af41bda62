"""What a plan was made from, as values to compare: whether a model is as it was costs a tenth of planning it again.

Of tensors these are what `megatron_fsdp` reads of them; of modules (`parts`) what names are made from, and which
modules they are; of the job (`marks_of_job`) this rank's place.  Nothing is kept alive: a module that died
equals no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple
from weakref import ref

import torch

from mbridge_fsdp_ckpt.families.registry import default_registry
from mbridge_fsdp_ckpt.live.topology import coordinates, topology

_OF_PARAMETERS = "megatron_fsdp_slice", "_tensor_parallel_mode", "tensor_model_parallel", "partition_dim"
_OF_ORIGINALS = "partition_stride", "partition_sizes"


class Marks(NamedTuple):
    """Tensors as they were.

    Args:
        parameters: The parameters among them.  What one of them is for good is not asked again: its shape, say.
        columns: See `_columns`.
        trained: Whether each parameter is: where that alone has changed, a plan is still one, if not an even one.
    """

    parameters: list[ref[Any]]
    columns: list[Any]
    trained: list[bool]

    def fit(self, state: Mapping[str, torch.Tensor]) -> bool:
        """Whether tensors are as they were: these parameters, and buffers like those that there were.

        Args:
            state: See `marks_of_tensors`.
        """
        return self.fit_but_for_training(state) and self.trains_the_same()

    def trains_the_same(self) -> bool:
        """Whether those parameters are trained that were."""
        return _trained([parameter() for parameter in self.parameters]) == self.trained

    def fit_but_for_training(self, state: Mapping[str, torch.Tensor]) -> bool:
        """See `fit`: whichever of them are trained."""
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
    return Marks(list(map(ref, parameters)), _columns(state, parameters), _trained(parameters))


class JobMarks(NamedTuple):
    """What a plan depends on beside modules and tensors.

    Args:
        place: See `coordinates`.
        sizes: See `topology`.
        families: Those that may claim a parameter.
    """

    place: dict[str, int]
    sizes: dict[str, int | str]
    families: tuple[Any, ...]


def marks_of_job() -> JobMarks:
    """This rank's place in the job, as it is now."""
    return JobMarks(coordinates(), topology(), default_registry().families)


def _parameters(state: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in state.values() if "orig_param" in vars(tensor)]


def _trained(parameters: Iterable[Any]) -> list[bool]:
    return [parameter.requires_grad for parameter in parameters]


def _columns(state: Mapping[str, torch.Tensor], parameters: Sequence[Any]) -> list[Any]:
    """What is asked of each tensor; a list an attribute."""
    own = list(map(vars, parameters))
    originals = [vars(of["orig_param"]) for of in own]
    return [
        list(state),
        [None if "orig_param" in vars(tensor) else tensor.shape for tensor in state.values()],
        [getattr(parameter, "_local_tensor", parameter).numel() for parameter in parameters],
        [ref(of["megatron_fsdp_dist_index"]) for of in own],
        *([of.get(name) for of in own] for name in _OF_PARAMETERS),
        *([of.get(name) for of in originals] for name in _OF_ORIGINALS),
    ]
