"""The plans of a model's tensors.

Planning is arithmetic, and its result is kept for as long as all stands that it was made from (`marks`, `parts`);
tensors are looked up anew each time.  To do so takes milliseconds for hundreds of experts: a save that goes on beside
the training remembers at its call what a forward pass may change, and looks when the model computes again
(`remember`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch

from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.families.hidden import refuse_hidden
from mbridge_fsdp_ckpt.families.registry import default_registry
from mbridge_fsdp_ckpt.live.fp8.state import scaling
from mbridge_fsdp_ckpt.live.marks import JobMarks, Marks, marks_of_job, marks_of_tensors
from mbridge_fsdp_ckpt.live.megatron_fsdp import (
    ModelParameter,
    local_shard,
    model_parameters,
    storage_of,
    tensors_of,
)
from mbridge_fsdp_ckpt.live.own_state import keepers
from mbridge_fsdp_ckpt.live.parts import BufferPlace, PartMarks, Places, marks_of_parts, parts_as_marked, parts_of
from mbridge_fsdp_ckpt.live.refusals import refuse_unreadable
from mbridge_fsdp_ckpt.live.registrations import registrations
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
            UnsupportedStateError: See `refuse_unreadable`.
        """
        shard = local_shard(self.tensor)
        refuse_unreadable(shard, self.plan.layout.key)
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
        return _some_on_device(self.tensors)


@dataclass(slots=True)
class _Known:
    """The plans of a model's tensors, as `PlannedTensors` has them; what they were made from, and where those lie.

    Args:
        of_job: See `JobMarks`.
        of_parts: See `PartMarks`.
        of_tensors: See `Marks`.
        places: Of all tensors.
        plans: See `PlannedTensors`.
        buffers: See `PlannedTensors`.
        buffer_places: Of each of these.
        samples: A parameter for each piece of memory that they lie in.
        stateful: The modules that may have FP8 state, or keep state of their own.
        registered: `registrations` when somebody last saw that all of it stands.
    """

    of_job: JobMarks
    of_parts: PartMarks
    of_tensors: Marks
    places: Places
    plans: tuple[tuple[ParameterPlan, bool], ...]
    buffers: tuple[int, ...]
    buffer_places: list[BufferPlace]
    samples: list[ref[torch.Tensor]]
    stateful: list[ref[Any]]
    registered: int


_known: WeakKeyDictionary[object, _Known] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Remembered:
    """A model's tensors before they are looked up: in hand is what a forward pass may change, its buffers.

    Args:
        module: A `MegatronFSDP` module.
        known: What an earlier look found.
        buffers: Of that, those in whose place others may lie by now; by name.
        is_on_device: See `PlannedTensors`.
    """

    module: Any
    known: _Known
    buffers: dict[str, torch.Tensor]
    is_on_device: bool

    @property
    def plans(self) -> tuple[tuple[ParameterPlan, bool], ...]:
        """See `PlannedTensors`."""
        return self.known.plans

    def each(self) -> list[Planned]:
        """See `PlannedTensors`.  Of any thread, until an optimizer steps.

        Raises:
            ConfigurationError: The model is another one by now, or was at the call, where nothing had told of it.
        """
        known, marked = self.known, parts_as_marked(self.module, self.known.of_parts)
        tensors = known.places.find(self.module, marked, self.buffers) if marked is not None else None
        if tensors is None or not known.of_tensors.fit_but_for_training(tensors):
            _known.pop(self.module, None)
            raise ConfigurationError(
                expected="the modules and parameters of the save before, and no others until all of this one is copied",
                found="some that were removed, replaced or renamed, or put where torch registers none",
                remedy="Save again: the next save looks at all of the model first. Before a model changes otherwise "
                "than by training, call Saving.wait_until_taken().",
            )
        if not known.of_tensors.trains_the_same():  # others are trained now: the next save shares out anew
            _known.pop(self.module, None)
        return PlannedTensors(known.plans, list(tensors.values()), known.buffers).each()

    def held_still(self) -> Remembered:
        """See `PlannedTensors`."""
        return replace(self, buffers={name: tensor.clone() for name, tensor in self.buffers.items()})


def plan_model(module: Any) -> list[Planned]:
    """Plan every parameter and persistent buffer of a `MegatronFSDP` module; not twice while its structure stands.

    Raises:
        LayoutError, FamilyError: See `model_parameters`, `FamilyRegistry`.
    """
    return plan_with_parts(module, marks_of_job())[0].each()


def plan_with_parts(module: Any, of_job: JobMarks) -> tuple[PlannedTensors, list[Any]]:
    """The same, in the job as it is now, and the module with all below it: see `parts_of`."""
    known, registered = _known.get(module), registrations()
    marked = parts_as_marked(module, known.of_parts) if known is not None else None
    tensors = known.places.find(module, marked) if known is not None and marked is not None else None
    parts = marked or parts_of(module)
    if tensors is None:
        tensors = tensors_of(module)
    if known is None or marked is None or known.of_job != of_job or not known.of_tensors.fit(tensors):
        places, plans = Places.of(module, parts, tensors), tuple(_plans(model_parameters(module)))
        known = _known[module] = _Known(
            of_job=of_job,
            of_parts=marks_of_parts(parts),
            of_tensors=marks_of_tensors(tensors),
            places=places,
            plans=plans,
            buffers=tuple(place for place, (_, is_buffer) in enumerate(plans) if is_buffer),
            buffer_places=places.buffers(parts, tensors),
            samples=_samples(tensors.values()),
            stateful=list(map(ref, [*scaling(parts), *keepers(parts)])),
            registered=registered,
        )
    known.registered = registered
    return PlannedTensors(known.plans, list(tensors.values()), known.buffers), parts


def _samples(tensors: Iterable[torch.Tensor]) -> list[ref[torch.Tensor]]:
    """One parameter for each piece of memory: they are moved together."""
    parameters = [tensor for tensor in tensors if isinstance(tensor, torch.nn.Parameter)]
    of_memory = {storage_of(local_shard(parameter)): parameter for parameter in parameters}
    return list(map(ref, of_memory.values()))


def remember(module: Any, of_job: JobMarks) -> tuple[PlannedTensors | Remembered, Iterable[Any]]:
    """What a save that goes on beside the training has to see at its call; all, where something may have changed.

    Returns:
        The tensors, and the modules that may have FP8 state, or keep state of their own.
    """
    known = _known.get(module)
    if known is None or known.registered != registrations() or known.of_job != of_job:
        return plan_with_parts(module, of_job)
    found = ((place.name, place.find()) for place in known.buffer_places)
    buffers = {name: tensor for name, tensor in found if tensor is not None}
    samples, parts = _alive(known.samples), _alive(known.stateful)
    as_many = len(known.buffer_places), len(known.samples), len(known.stateful)
    if known.places.known is None or (len(buffers), len(samples), len(parts)) != as_many:
        return plan_with_parts(module, of_job)
    return Remembered(module, known, buffers, _some_on_device((*samples, *buffers.values()))), parts


def _some_on_device(tensors: Iterable[torch.Tensor]) -> bool:
    return any(local_shard(tensor).is_cuda for tensor in tensors)


def _alive[T](refs: Iterable[ref[T]]) -> list[T]:
    return [there for known in refs if (there := known()) is not None]


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
    registry = default_registry()
    claim = registry.claim(parameter.context) if parameter.context else None
    if parameter.context and claim is None and parameter.layout.tensor_parallel_dim is not None:
        refuse_hidden(parameter.context, registry)
    return plan_parameter(parameter.layout, claim)
