"""The plans of a model's tensors.

Planning is arithmetic, and its result is kept for as long as all stands that it was made from (`marks`, `parts`);
tensors are looked up anew each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from mbridge_fsdp_ckpt.families.registry import default_registry
from mbridge_fsdp_ckpt.live.marks import Marks, marks_of_tensors
from mbridge_fsdp_ckpt.live.megatron_fsdp import (
    ModelParameter,
    local_shard,
    model_parameters,
    refuse_quantized,
    tensors_of,
)
from mbridge_fsdp_ckpt.live.parts import PartMarks, Places, marks_of_parts, parts_as_marked, parts_of
from mbridge_fsdp_ckpt.plan.pieces import ParameterPlan, plan_parameter
from mbridge_fsdp_ckpt.plan.shares import shared_out


class Planned(NamedTuple):
    """A parameter or buffer of the model with its plan."""

    plan: ParameterPlan
    tensor: torch.Tensor
    """The parameter that the optimizer updates, the main weight; or a persistent buffer."""
    is_buffer: bool
    """Whether it is a buffer: whole on every rank that has it, of any strides."""

    def elements(self) -> torch.Tensor:
        """This rank's shard, flattened, to be read: a copy of a buffer that cannot be flattened in place.

        Raises:
            UnsupportedStateError: See `refuse_quantized`.
        """
        shard = local_shard(self.tensor)
        refuse_quantized(shard, self.plan.layout.key)
        return shard.reshape(-1)


class PlannedTensors(NamedTuple):
    """A model's parameters and buffers with their plans, before there is a thing for each: that takes a call's time.

    Args:
        plans: Of each, and whether it is a buffer.
        tensors: As they are now.
        buffers: The places of buffers among them.
    """

    plans: tuple[tuple[ParameterPlan, bool], ...]
    tensors: list[torch.Tensor]
    buffers: tuple[int, ...]

    def each(self) -> list[Planned]:
        """One after the other."""
        items = zip(self.plans, self.tensors, strict=True)
        return [Planned(plan, tensor, is_buffer) for (plan, is_buffer), tensor in items]

    def held_still(self) -> PlannedTensors:
        """The same with copies of buffers: a forward pass may change them."""
        still = list(self.tensors)
        for place in self.buffers:
            still[place] = still[place].clone()
        return self._replace(tensors=still)

    @property
    def is_on_device(self) -> bool:
        """Whether some of it is."""
        return any(tensor.is_cuda for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class _Known:
    """The plans of a model's tensors, as `PlannedTensors` has them; what they were made from, and where those lie."""

    of_parts: PartMarks
    of_tensors: Marks
    places: Places
    plans: tuple[tuple[ParameterPlan, bool], ...]
    buffers: tuple[int, ...]


_known: WeakKeyDictionary[object, _Known] = WeakKeyDictionary()


def plan_model(module: Any) -> list[Planned]:
    """Plan every parameter and persistent buffer of a `MegatronFSDP` module; not twice while its structure stands.

    Raises:
        LayoutError, FamilyError: See `model_parameters`, `FamilyRegistry`.
    """
    return plan_with_parts(module)[0].each()


def plan_with_parts(module: Any) -> tuple[PlannedTensors, list[Any]]:
    """The same, and the module with all below it: see `parts_of`."""
    known = _known.get(module)
    marked = parts_as_marked(module, known.of_parts) if known is not None else None
    tensors = known.places.find(module, marked) if known is not None and marked is not None else None
    parts = marked or parts_of(module)
    if tensors is None:
        tensors = tensors_of(module)
    if known is None or marked is None or not known.of_tensors.fit(tensors):
        places, plans = Places.of(module, parts, tensors), tuple(_plans(model_parameters(module)))
        buffers = tuple(place for place, (_, is_buffer) in enumerate(plans) if is_buffer)
        known = _known[module] = _Known(marks_of_parts(parts), marks_of_tensors(tensors), places, plans, buffers)
    return PlannedTensors(known.plans, list(tensors.values()), known.buffers), parts


def _plans(tensors: list[ModelParameter]) -> Iterator[tuple[ParameterPlan, bool]]:
    """Each tensor's plan, and whether it is a buffer.

    Ranks share out what they hold of parameters.  Which buffers a rank has may depend on what it has computed: each of
    them has a writer of its own (`plan.pieces.owner`).
    """
    plans = list(map(_plan, tensors))
    parameters = [(plan, tensor) for plan, tensor in zip(plans, tensors, strict=True) if tensor.context is not None]
    shared = iter(shared_out([plan for plan, _ in parameters], [tensor.bytes_per_element for _, tensor in parameters]))
    for plan, tensor in zip(plans, tensors, strict=True):
        yield (plan, True) if tensor.context is None else (next(shared), False)


def _plan(parameter: ModelParameter) -> ParameterPlan:
    claim = default_registry().claim(parameter.context) if parameter.context else None
    return plan_parameter(parameter.layout, claim)
