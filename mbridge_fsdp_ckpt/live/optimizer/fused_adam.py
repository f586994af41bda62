# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's FusedAdam: the step counter lives in the group, states may be of lower precision.

Its state is a DTensor for DTensor parameters since Transformer Engine's pull request 2795 and a plain local tensor
before; both are read.  `initialize_state` (public) makes a state as the installed version keeps it: a load fills
that memory, and puts it in place, without another copy of it.
fp16 and fp8 states carry a scale a shard: they are stored as the fp32 values they stand for.

With `master_weights` it keeps a copy of the weight in high precision, or, of bf16 weights, the 16 bits that these lack
(`store_param_remainders`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from mbridge_fsdp_ckpt.errors import UnsupportedStateError
from mbridge_fsdp_ckpt.live.optimizer.base import (
    MASTER,
    STEP,
    Copy,
    Group,
    Hyperparameters,
    Slot,
    SlotSpec,
    State,
    empty_slot,
    groups_of,
    put_in_place,
    restored,
    slot_of,
)
from mbridge_fsdp_ckpt.live.optimizer.torch_optimizer import TorchOptimizerAdapter, class_name, set_hyperparameters
from mbridge_fsdp_ckpt.live.tensors import local_shard
from mbridge_fsdp_ckpt.versions import probe

_SCALED = (torch.float16, torch.uint8)
_Kept = tuple[State, State]
"""What the optimizer keeps of a parameter: its state, and the scales of slots of low precision."""


class FusedAdamAdapter:
    """See `OptimizerAdapter`."""

    def __init__(self, optimizer: Any) -> None:
        probe("a FusedAdam", optimizer)
        self.optimizer = optimizer
        self._made: dict[torch.Tensor, _Kept] = {}
        self._loaded, self._counted = set[int](), set[int]()
        self._kept: dict[torch.dtype, dict[str, SlotSpec]] = {}

    @cached_property
    def _groups(self) -> dict[int, Hyperparameters]:
        """Not asked for by a save."""
        return groups_of(self.optimizer)

    def groups(self) -> list[Group]:
        """See `OptimizerAdapter`."""
        return TorchOptimizerAdapter(self.optimizer).groups()

    def slots(self, parameter: torch.Tensor) -> dict[str, Slot]:
        """See `OptimizerAdapter`."""
        state = self.optimizer.state.get(parameter, {})
        return {name: self._slot(name, value, parameter) for name, value in state.items()}

    def _slot(self, name: str, value: torch.Tensor, parameter: torch.Tensor) -> Slot:
        if not self._scaled(name):
            return slot_of(name, value, parameter, is_local=True)
        unscaled = self.optimizer.get_unscaled_state(parameter, name)
        slot = slot_of(name, unscaled, parameter, is_local=True)
        return replace(slot, scaled_from=self._dtype_of(name), kept=value)

    def class_name(self, parameter: torch.Tensor) -> str:
        """See `OptimizerAdapter`."""
        return class_name(self.optimizer)

    def expected(self, parameter: torch.Tensor, kept_by: str | None) -> dict[str, SlotSpec]:
        """See `OptimizerAdapter`: what it makes of a parameter of two elements."""
        if parameter.dtype not in self._kept:
            small = torch.zeros(2, dtype=parameter.dtype, device=parameter.device)
            made, _ = self._make_state(small)
            self._kept[parameter.dtype] = {
                name: SlotSpec("sharded", torch.float32, self._dtype_of(name))
                if self._scaled(name)
                else SlotSpec("sharded", value.dtype)
                for name, value in made.items()
            }
        return self._kept[parameter.dtype]

    def counter(self, parameter: torch.Tensor) -> Hyperparameters | None:
        """See `OptimizerAdapter`."""
        return self._groups.get(id(parameter))

    def allocate(self, parameter: torch.Tensor, specs: dict[str, SlotSpec]) -> dict[str, Slot]:
        """See `OptimizerAdapter`.  Slots are the memory of a new state; those that get a scale wait on the host.

        Raises:
            UnsupportedStateError: A slot is none that this optimizer keeps.
        """
        made, _ = self._made[parameter] = self._make_state(parameter)
        return {name: self._allocated(parameter, name, spec, made) for name, spec in specs.items() if name != STEP}

    def _allocated(self, parameter: torch.Tensor, name: str, spec: SlotSpec, made: State) -> Slot:
        live = local_shard(made[name]) if name in made else None
        if live is None or spec.kind != "sharded" or spec.dtype.is_floating_point != live.is_floating_point():
            kept = ", ".join(f"{slot} ({local_shard(value).dtype})" for slot, value in made.items())
            raise UnsupportedStateError(
                expected=f"state as this FusedAdam keeps it: {kept}",
                found=f"a slot {name!r} of {spec.dtype}, {spec.kind}",
                remedy="Build the optimizer as the saving job did. Nothing was changed.",
            )
        if self._scaled(name):
            return empty_slot(parameter, SlotSpec(spec.kind, torch.float32), torch.device("cpu"))
        return Slot("sharded", live.view(-1))

    def _make_state(self, parameter: torch.Tensor) -> _Kept:
        """A parameter's state and scales as the installed version keeps them; the optimizer's own stay as they are."""
        optimizer = self.optimizer
        remainders = optimizer.store_param_remainders and parameter.dtype == torch.bfloat16
        before = _take(optimizer, parameter)
        try:
            optimizer.initialize_state(parameter, remainders)
        finally:
            made = _take(optimizer, parameter)
            _put(optimizer, parameter, before)
        return made

    def install(self, parameter: torch.Tensor, slots: dict[str, Slot], step: float | None) -> None:
        """See `OptimizerAdapter`."""
        self._loaded.add(id(self._groups.get(id(parameter))))
        if not slots:
            self.optimizer.state.pop(parameter, None)
            return
        self._set_step(parameter, step)
        made, scales = self._made.pop(parameter)
        plain = {name: live for name, live in self.optimizer.state.get(parameter, {}).items() if not self._scaled(name)}
        scales = put_in_place(self.optimizer._scales.get(parameter, {}), scales)
        _put(self.optimizer, parameter, (put_in_place(plain, made), scales))
        for name, slot in slots.items():
            if self._scaled(name):
                self.optimizer.set_scaled_state(parameter, name, slot.tensor.view(local_shard(parameter).shape))

    def refresh(self, parameter: torch.Tensor, copy: Copy) -> None:
        """See `OptimizerAdapter`."""
        master = self.optimizer.state.get(parameter, {}).get(MASTER)
        if master is None:
            return
        weight, live = local_shard(parameter).reshape(-1), local_shard(master)
        if self._scaled(MASTER):
            unscaled = local_shard(self.optimizer.get_unscaled_state(parameter, MASTER)).reshape(-1)
            copy(unscaled, weight)
            self.optimizer.set_scaled_state(parameter, MASTER, unscaled.view(live.shape))
        elif live.is_floating_point():
            copy(live.view(-1), weight)
        else:  # bits that the weight lacks: it lacks none
            copy(live.view(-1), torch.zeros_like(live).view(-1))

    def finish(self, groups: list[Hyperparameters] | None) -> None:
        """See `OptimizerAdapter`.  A group of which nothing in the checkpoint has counted steps begins at 0."""
        for live, saved in zip(self.optimizer.param_groups, groups or (), strict=groups is not None):
            if STEP in saved:
                live.setdefault(STEP, self._counter())
            elif STEP in live and id(live) in self._loaded - self._counted:
                live[STEP] = restored(live[STEP], 0)
        set_hyperparameters(self.optimizer, groups)

    def _set_step(self, parameter: torch.Tensor, step: float | None) -> None:
        """Where the saving optimizer counted a parameter; a saved group's counter overrides it in `finish`."""
        group = self._groups.get(id(parameter))
        if step is not None and group is not None:
            self._counted.add(id(group))
            group[STEP] = restored(group.get(STEP, self._counter()), int(step))

    def _counter(self) -> torch.Tensor | int:
        """A counter as the first step would make it, before that step."""
        if not self.optimizer.capturable:
            return 0
        return torch.zeros(1, dtype=torch.int, device=self.optimizer._dummy_overflow_buf.device)

    def _scaled(self, name: str) -> bool:
        return self._dtype_of(name) in _SCALED

    def _dtype_of(self, name: str) -> Any:
        """The dtype that the optimizer keeps a slot in."""
        return self.optimizer.name_to_dtype_map.get(name)


def _take(optimizer: Any, parameter: torch.Tensor) -> _Kept:
    return optimizer.state.pop(parameter, {}), optimizer._scales.pop(parameter, {})


def _put(optimizer: Any, parameter: torch.Tensor, state: _Kept) -> None:
    for holder, values in zip((optimizer.state, optimizer._scales), state, strict=True):
        if values:
            holder[parameter] = values
