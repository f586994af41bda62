# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Optimizer state in a load: allocate memory, fill what the checkpoint does not cover, and put it in place.

Every element that becomes live was read, or is what a rule says: zero in a slot, the weight in a copy of the weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from mbridge_fsdp_ckpt.errors import ConfigurationError, UnsupportedStateError
from mbridge_fsdp_ckpt.live.local_shards import OptimizerPart
from mbridge_fsdp_ckpt.live.optimizer.base import MASTER, STATISTICS, STEP, Hyperparameters, Slot
from mbridge_fsdp_ckpt.loading.destinations import Targets, add_targets, scalar
from mbridge_fsdp_ckpt.loading.opened import Opened
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.slices import ParameterPlan
from mbridge_fsdp_ckpt.remedies import remedy


@dataclass(frozen=True, slots=True)
class Allocated:
    """Memory for the optimizer state of one parameter, which the optimizer does not use yet.

    Args:
        part: The optimizer of the parameter.
        parameter: The parameter.
        plan: The plan of the parameter.
        slots: The slots to fill; none where the parameter was saved without state, or has no elements here.
        step: The parameter's own step counter, once it is read; None where the checkpoint has none.
    """

    part: OptimizerPart
    parameter: torch.Tensor
    plan: ParameterPlan
    slots: dict[str, Slot]
    step: torch.Tensor | None

    def counted(self, opened: Opened) -> float | None:
        """The number of steps of the parameter, wherever the saving optimizer counted them."""
        if self.step is not None:
            return float(self.step.item())
        counted = opened.hyperparameters.get(self.plan.layout.optimizer_name, {}).get(STEP)
        return None if counted is None else float(counted)


def allocate(opened: Opened, targets: Targets) -> Iterator[Allocated]:
    """Allocate memory for the state that is loaded.  Elements that the checkpoint does not cover are zero.

    Args:
        opened: The checkpoint.
        targets: The places to read into; the allocated slots are added to them.
    """
    for part in opened.parts:
        for parameter, plan in part.parameters():
            yield _allocate(opened, part, parameter, plan, targets)


def _allocate(
    opened: Opened, part: OptimizerPart, parameter: torch.Tensor, plan: ParameterPlan, targets: Targets
) -> Allocated:
    specs = opened.specs.get(plan, {})
    if not plan.slices or not specs:
        return Allocated(part, parameter, plan, {}, None)
    held = plan.slices[0].component
    slots = part.adapter.allocate(parameter, specs)
    for name, slot in slots.items():
        if slot.kind == "sharded":
            key_of = partial(plan.slot_key, slot=name)
            if _covered_elements(opened, plan, name) < slot.tensor.numel():
                slot.tensor.zero_()
            add_targets(targets, plan, key_of, slot.tensor, opened.asked)
        elif name != STEP and plan.slot_key(held, name) in opened.asked:
            targets[plan.slot_key(held, name)].append(scalar(slot.tensor))
    step = None
    if plan.slot_key(held, STEP) in opened.asked:
        step = torch.zeros((), dtype=torch.float64)
        targets[plan.slot_key(held, STEP)].append(scalar(step))
    return Allocated(part, parameter, plan, slots, step)


def _covered_elements(opened: Opened, plan: ParameterPlan, slot: str) -> int:
    """How many elements of a slot's local shard the checkpoint has."""
    boxes = (opened.covered(plan.slot_key(slice_.component, slot), slice_.box) for slice_ in plan.slices)
    return sum(box.volume for box in boxes if box is not None)


def check_counters(opened: Opened, allocated: list[Allocated]) -> None:
    """Check that parameters whose steps one counter counts were saved after the same number of steps.

    Raises:
        ConfigurationError: The numbers differ, or a parameter that is not loaded has made another number of steps.
    """
    steps: dict[int, tuple[str, float]] = {}
    for item in allocated:
        counter, step = item.part.adapter.counter(item.parameter), item.counted(opened)
        if not item.slots or counter is None or step is None:
            continue  # saved without state, or without elements here
        name = item.plan.layout.optimizer_name
        first, known = steps.setdefault(id(counter), (name, step))
        if known != step:
            raise _differing_steps(f"{known:g} of {first} and {step:g} of {name} in the checkpoint", name)
    for item in allocated:
        counter = item.part.adapter.counter(item.parameter) if item.plan.slices else None
        if counter is not None:  # of which nothing was counted: it begins again
            steps.setdefault(id(counter), (item.plan.layout.optimizer_name, item.counted(opened) or 0.0))
    loaded = {id(item.parameter) for item in allocated}
    for part in opened.all_parts:
        for parameter, plan in part.parameters():
            counter = part.adapter.counter(parameter) if id(parameter) not in loaded and plan.slices else None
            if counter is None or id(counter) not in steps or not part.adapter.slots(parameter):
                continue
            first, step = steps[id(counter)]
            if float(counter.get(STEP, step)) != step:
                name = plan.layout.optimizer_name
                found = (
                    f"{step:g} of {first} in the checkpoint and {float(counter[STEP]):g} of {name}, which is left out"
                )
                raise _differing_steps(found, name)


def _differing_steps(found: str, name: str) -> ConfigurationError:
    return ConfigurationError(
        expected="the same number of steps for all parameters of a param group that counts them together",
        found=found,
        remedy=remedy(
            "Put parameters that were trained for different numbers of steps in param groups of their own.",
            "Or load weights alone, with {weights_only}.",
            "Nothing was changed.",
        ),
        key=name,
    )


def install(opened: Opened, allocated: list[Allocated]) -> None:
    """Put loaded state in place, if there is any, then refresh the copies of weights that the optimizer keeps."""
    for item in allocated:
        item.part.adapter.install(item.parameter, item.slots, item.counted(opened) if item.slots else None)
    with_new_state = {id(item.parameter) for item in allocated if item.slots}
    for part in opened.parts:
        for parameter, plan in part.parameters():
            regions = list(_to_refresh(opened, plan, has_new_state=id(parameter) in with_new_state))
            if regions:
                part.adapter.refresh(parameter, partial(_copy, plan, regions))
    for part in opened.parts:
        groups = [_saved_group(opened, names) for names in part.group_names()] if opened.with_state else None
        part.adapter.finish(groups)


def _saved_group(opened: Opened, names: list[str]) -> Hyperparameters:
    """The hyperparameters that the parameters of a group were saved with; empty where none of them was saved."""
    return next((opened.hyperparameters[name] for name in names if name in opened.hyperparameters), {})


type _Region = tuple[int, Box]
"""The number of a slice, and a block of it."""


def _to_refresh(opened: Opened, plan: ParameterPlan, *, has_new_state: bool) -> Iterator[_Region]:
    """The blocks in which copies of a weight have to be set from the weight.

    In new state, these are all blocks that were not read.  Otherwise they are the components whose weight was filled:
    the copy of another component may be more precise than the weight, and stays.
    """
    for number, slice_ in enumerate(plan.slices):
        if has_new_state:
            read = opened.covered(plan.slot_key(slice_.component, MASTER), slice_.box)
            yield from ((number, box) for box in slice_.box.without(read))
        elif plan.model_key(slice_.component) in opened.asked:
            yield number, slice_.box


def _copy(plan: ParameterPlan, regions: list[_Region], destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy some blocks of a parameter from one flat local tensor to another.

    Args:
        plan: The plan of the parameter.
        regions: The blocks.
        destination: The flat local tensor to copy to.
        source: The flat local tensor to copy from.
    """
    for number, box in regions:
        slice_ = plan.slices[number]
        index = box.slices_in(slice_.box)
        slice_.block(destination)[index].copy_(slice_.block(source)[index])


def unknown_slots(opened: Opened, allocated: list[Allocated]) -> list[str]:
    """Names of optimizer slots that may be copies of weights, and do not match the loaded weights.

    The package knows only statistics such as `exp_avg`, and fp32 copies of weights.  Other slots do not match where
    weights are loaded without optimizer state, or where the checkpoint lacks elements of a slot, which become zero.
    """
    found, known = set[str](), STATISTICS | {MASTER}
    if opened.with_weights and not opened.with_state:
        for part in opened.parts:
            for parameter, plan in part.parameters():
                if any(opened.covered(plan.model_key(slice_.component), slice_.box) for slice_ in plan.slices):
                    found |= _sharded_slots(part, parameter)
    for item in allocated:
        for name, slot in item.slots.items():
            if name in known or slot.kind != "sharded":
                continue
            if _covered_elements(opened, item.plan, name) < slot.tensor.numel():
                found.add(name)
    return sorted(found - known)


def _sharded_slots(part: OptimizerPart, parameter: torch.Tensor) -> set[str]:
    try:
        return {name for name, slot in part.adapter.slots(parameter).items() if slot.kind == "sharded"}
    except UnsupportedStateError:  # which a save refuses: there is state, and nothing of it is loaded
        return {f"state of {part.adapter.class_name(parameter)}"}
