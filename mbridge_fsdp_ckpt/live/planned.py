# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The plans of a model's tensors.

Planning is arithmetic, and its result is kept for as long as all stands that it was made from (`structure`); tensors
are looked up anew each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch

from mbridge_fsdp_ckpt.families.hidden import refuse_hidden
from mbridge_fsdp_ckpt.families.registry import default_registry
from mbridge_fsdp_ckpt.live.readers.megatron_fsdp import ModelParameter, local_shard, model_parameters, tensors_of
from mbridge_fsdp_ckpt.live.refusals import refuse_unreadable
from mbridge_fsdp_ckpt.live.structure import (
    JobMarks,
    Place,
    Structure,
    found_at,
    marks_of_job,
    parts_of,
    places_of,
    structure_of,
)
from mbridge_fsdp_ckpt.plan.shares import shared_out
from mbridge_fsdp_ckpt.plan.slices import ParameterPlan, plan_parameter


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
            UnsupportedStateError: It is sparse, or one of Transformer Engine's quantized tensors.
        """
        shard = local_shard(self.tensor)
        refuse_unreadable(shard, self.plan.layout.key)
        return shard.reshape(-1)


class PlannedTensors(NamedTuple):
    """A model's parameters and buffers with their plans, before there is a thing for each: that takes a call's time.

    Args:
        plans: Of each, and whether it is a buffer.
        tensors: As they are now.
    """

    plans: tuple[tuple[ParameterPlan, bool], ...]
    tensors: list[torch.Tensor]

    def each(self) -> list[Planned]:
        """One after the other."""
        items = zip(self.plans, self.tensors, strict=True)
        return [Planned(plan, tensor, is_buffer) for (plan, is_buffer), tensor in items]

    def with_buffers_copied(self) -> PlannedTensors:
        """The same with copies of buffers: a forward pass may change them."""
        items = zip(self.plans, self.tensors, strict=True)
        return self._replace(tensors=[tensor.clone() if is_buffer else tensor for (_, is_buffer), tensor in items])

    @property
    def is_on_device(self) -> bool:
        """Whether some of it is."""
        return any(getattr(tensor, "_local_tensor", tensor).is_cuda for tensor in self.tensors)


class _Known(NamedTuple):
    """The plans of a model's tensors, and what they were made from.

    Args:
        job: What plans depend on beside the model.
        parts: The module and all below it.
        marks: What names, layouts and the choice of tensors depend on.
        places: Where the tensors lie; None where that is not known of one.
        plans: Of each tensor, and whether it is a buffer.
    """

    job: JobMarks
    parts: list[ref[Any]]
    marks: list[list[Any]]
    places: list[Place] | None
    plans: tuple[tuple[ParameterPlan, bool], ...]

    def still(self, module: Any, job: JobMarks) -> Structure | None:
        """The model's structure, if the plans would be made alike of what it is now."""
        parts = [part() for part in self.parts]
        if job != self.job or any(part is None for part in parts):
            return None
        structure = structure_of(module, parts)
        return structure if structure.marks == self.marks else None


_known: WeakKeyDictionary[object, _Known] = WeakKeyDictionary()


def plan_model(module: Any) -> list[Planned]:
    """Plan every parameter and persistent buffer of a `MegatronFSDP` module; not twice while its structure stands.

    Raises:
        LayoutError, FamilyError: See `model_parameters`, `FamilyRegistry`.
    """
    return plan_with_parts(module, marks_of_job())[0].each()


def plan_with_parts(module: Any, job: JobMarks) -> tuple[PlannedTensors, list[Any]]:
    """The same, in the job as it is now, and the module with all below it: see `parts_of`."""
    known = _known.get(module)
    structure = known.still(module, job) if known is not None else None
    if known is not None and structure is not None and known.places is not None:
        return PlannedTensors(known.plans, found_at(known.places, structure)), structure.parts
    tensors = list(tensors_of(module).values())
    if known is None or structure is None:
        structure = structure_of(module, parts_of(module))
        places, plans = places_of(structure, tensors), tuple(_plans(model_parameters(module)))
        parts = list(map(ref, structure.parts))
        known = _Known(job, parts, structure.marks, places, plans)
        if structure.parameters:
            _known[module] = known
    return PlannedTensors(known.plans, tensors), structure.parts


def _plans(tensors: list[ModelParameter]) -> Iterator[tuple[ParameterPlan, bool]]:
    """Each tensor's plan, and whether it is a buffer.

    Ranks share out what they hold of parameters.  Which buffers a rank has may depend on what it has computed: each of
    them has a writer of its own (`plan.slices.owner`).
    """
    plans = list(map(_plan, tensors))
    parameters = [(plan, tensor) for plan, tensor in zip(plans, tensors, strict=True) if tensor.context is not None]
    shared = iter(shared_out([plan for plan, _ in parameters], [tensor.bytes_per_element for _, tensor in parameters]))
    for plan, tensor in zip(plans, tensors, strict=True):
        yield (plan, True) if tensor.context is None else (next(shared), False)


def _plan(parameter: ModelParameter) -> ParameterPlan:
    registry = default_registry()
    claim = registry.claim(parameter.context) if parameter.context else None
    if parameter.context and claim is None and parameter.layout.tensor_parallel_dim is not None:
        refuse_hidden(parameter.context, registry)
    return plan_parameter(parameter.layout, claim)
