# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The plans of a model's tensors.

Planning is arithmetic, and its result is kept for as long as all stands that it was made from (`Look.marks`); tensors
are looked up anew each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from mbridge_fsdp_ckpt.families.declaration import Family
from mbridge_fsdp_ckpt.families.hidden import refuse_hidden
from mbridge_fsdp_ckpt.families.registry import default_registry
from mbridge_fsdp_ckpt.live.readers.choice import reader_for
from mbridge_fsdp_ckpt.live.readers.protocol import Job, ModelParameter, Reader
from mbridge_fsdp_ckpt.live.refusals import refuse_unreadable
from mbridge_fsdp_ckpt.live.tensors import local_shard
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
        families: Those that may claim a parameter.
        marks: What names, layouts and the choice of tensors depend on.
        plans: Of each tensor, and whether it is a buffer.
    """

    job: Job
    families: tuple[Family, ...]
    marks: list[Any]
    plans: tuple[tuple[ParameterPlan, bool], ...]


_known: WeakKeyDictionary[object, _Known] = WeakKeyDictionary()


def plan_model(model: Any) -> list[Planned]:
    """Plan every parameter and persistent buffer of a model; not twice while its structure stands.

    Raises:
        ConfigurationError, LayoutError, FamilyError: See `reader_for`, `Reader`, `FamilyRegistry`.
    """
    return plan_with_parts(reader_for(model))[0].each()


def plan_with_parts(reader: Reader) -> tuple[PlannedTensors, list[Any]]:
    """The same of a model that a reader reads, and the modules that it is made of."""
    look, families = reader.look(), default_registry().families
    known = _known.get(reader.module)
    if known is not None and (known.job, known.families) == (reader.job, families) and known.marks == look.marks:
        return PlannedTensors(known.plans, look.tensors), look.parts
    plans = tuple(_plans(reader.layouts()))
    if look.marks is not None:
        _known[reader.module] = _Known(reader.job, families, look.marks, plans)
    return PlannedTensors(plans, look.tensors), look.parts


def _plans(tensors: list[ModelParameter]) -> Iterator[tuple[ParameterPlan, bool]]:
    """Each tensor's plan, and whether it is a buffer.

    Ranks share out what they hold of parameters.  Which buffers a rank has may depend on what it has computed: each of
    them has a writer of its own (`plan.slices.owner`).
    """
    plans = list(map(_plan, tensors))
    parameters = [(plan, tensor) for plan, tensor in zip(plans, tensors, strict=True) if not tensor.is_buffer]
    shared = iter(shared_out([plan for plan, _ in parameters], [tensor.bytes_per_element for _, tensor in parameters]))
    for plan, tensor in zip(plans, tensors, strict=True):
        yield (plan, True) if tensor.is_buffer else (next(shared), False)


def _plan(parameter: ModelParameter) -> ParameterPlan:
    registry = default_registry()
    claim = registry.claim(parameter.context) if parameter.context else None
    if parameter.context and claim is None and parameter.layout.tensor_parallel_dim is not None:
        refuse_hidden(parameter.context, registry)
    return plan_parameter(parameter.layout, claim)
