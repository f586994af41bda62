# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a save plans anew: nothing while the model is as it was, all of it once its structure has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.families.declaration import ParameterContext
from mbridge_fsdp_ckpt.families.registry import default_registry
from mbridge_fsdp_ckpt.live import planned
from mbridge_fsdp_ckpt.live.readers.megatron_fsdp import find_fsdp_module, layouts, tensors_of
from mbridge_fsdp_ckpt.saving.snapshot import Prepared, observe, plan_save
from testing.models import Recipe, Trainable
from tests.core import cases


class NoFamily:
    """A family that claims nothing."""

    name, version = "nothing", 1

    def segments(self, parameter: ParameterContext) -> None:
        """Of no parameter."""


@dataclass(slots=True)
class Saves:
    """A model whose saves are counted."""

    trainable: Trainable
    plannings: int = 0
    parameters: int = 0
    state_dicts: int = 0

    @property
    def module(self) -> Any:
        return find_fsdp_module(self.trainable.model)

    def parameter(self, name: str) -> Any:
        return next(tensor for key, tensor in tensors_of(self.module).items() if key.endswith(name))

    def part(self, name: str) -> Any:
        return next(part for key, part in self.module.named_modules() if key.endswith(name))

    def save(self) -> Prepared:
        """What a save plans, counted."""

        def counting(what: str, owner: Any, name: str) -> Any:
            plain = getattr(owner, name)

            def counted(*arguments: Any) -> Any:
                setattr(self, what, getattr(self, what) + 1)
                return plain(*arguments)

            return patch.object(owner, name, counted)

        counted = [
            ("plannings", layouts, "model_parameters"),
            ("parameters", planned, "plan_parameter"),
            ("state_dicts", layouts, "tensors_of"),
        ]
        with ExitStack() as stack:
            for what, owner, name in counted:
                stack.enter_context(counting(what, owner, name))
            return plan_save(observe(self.trainable.model, self.trainable.optimizer, None, None))


def again() -> dict[str, Any]:
    """Saves of a model that trains and whose values change: what is planned, and what is seen of the changes."""
    saves = Saves(cases.prepared(Recipe(layers=1), steps=1))
    saves.module.register_buffer("counter", torch.zeros(2))
    before = saves.save()
    first = saves.plannings, saves.parameters
    saves.trainable.step(1)
    saves.module.counter = torch.ones(2, dtype=torch.float64)
    group = saves.trainable.optimizer.param_groups[0]
    group["lr"] = 0.125
    held = {item.key: item for item in saves.save().shards}
    counter = next(item for key, item in held.items() if key.endswith("counter"))
    group["params"] = group["params"][1:]
    return {
        "first": first,
        "later": (saves.plannings - first[0], saves.parameters - first[1]),
        "state dicts": saves.state_dicts,
        "tensors": len(tensors_of(saves.module)),
        "same": held.keys() == {item.key for item in before.shards},
        "counter": (counter.entry.dtype, counter.elements().tolist()),
        "rates": [values["lr"] for values in saves.save().write_plan.hyperparameters.values()],
        "parameters": (len(before.write_plan.said.parameters), len(saves.save().write_plan.said.parameters)),
        "in the end": saves.plannings,
    }


def regrouped() -> dict[str, bool]:
    """Param groups that change between a save's call and its plan: whether it saves those of the call."""
    trainable = cases.prepared(Recipe(layers=1), steps=1)
    whole = trainable.model, trainable.optimizer, None, None
    wanted = plan_save(observe(*whole)).write_plan
    seen = observe(*whole)
    groups = trainable.optimizer.param_groups
    groups[0]["params"] = groups[0]["params"][1:]
    groups[0]["added"] = 1
    groups.append({**groups[0], "params": [torch.nn.Parameter(torch.ones(1))]})
    found = plan_save(seen).write_plan
    return {"said": found.said == wanted.said, "hyperparameters": found.hyperparameters == wanted.hyperparameters}


def found_again() -> dict[str, bool]:
    """What is found without a state dict: as one has it, whichever parameters are in their modules."""
    saves = Saves(cases.prepared(Recipe(layers=1, experts=2), steps=1))
    module, norm = saves.module, saves.part("final_layernorm")
    main = saves.parameter("final_layernorm.weight")

    def are_found() -> bool:
        saves.state_dicts = 0
        held = saves.save().shards
        names = {id(tensor) for tensor in tensors_of(module).values()}
        return saves.state_dicts == 0 and names >= {id(item.kept) for item in held if item.is_buffer}

    saves.save()
    first = are_found()
    saves.trainable.step(1)
    return {"first": first, "computes": norm.weight is not main, "later": are_found()}


def changes(saves: Saves) -> dict[str, Callable[[], object]]:
    """What may change in a model, one after the other."""
    from megatron.core import parallel_state

    layer, experts, norm = saves.part("layers.0"), saves.part(".experts"), saves.parameter("final_layernorm.weight")
    router = saves.part(".router")
    return {
        "a buffer": lambda: router.register_buffer("seen", torch.zeros(2)),
        "a buffer's shape": lambda: setattr(router, "seen", torch.zeros(3)),
        "a buffer's name": lambda: router._buffers.update(found=router._buffers.pop("seen")),
        "no buffer yet": lambda: router.register_buffer("late", None),
        "a buffer that was none": lambda: setattr(router, "late", torch.zeros(2)),
        "a layer's number": lambda: setattr(layer, "layer_number", 5),
        "a module's first number": lambda: setattr(saves.part("final_layernorm"), "layer_number", 1),
        "a number of experts": lambda: setattr(experts, "num_local_experts", 3),
        "a module": lambda: setattr(layer, "mlp", copy.copy(layer.mlp)),
        "an expert-parallel rank": lambda: parallel_state.set_expert_model_parallel_rank(1),
        "families": lambda: default_registry().register(NoFamily()),
        "a weight that is frozen": lambda: norm.requires_grad_(requires_grad=False),
        "a mesh": lambda: setattr(norm, "megatron_fsdp_dist_index", copy.copy(norm.megatron_fsdp_dist_index)),
        "a dimension": lambda: setattr(norm, "partition_dim", 0),
    }


@contextmanager
def changing() -> Iterator[None]:
    """Around what changes more than a model: put back afterwards."""
    from megatron.core import parallel_state

    try:
        yield
    finally:
        default_registry().unregister("nothing")
        parallel_state.set_expert_model_parallel_rank(0)


def changed() -> dict[str, tuple[int, str]]:
    """By what changed in a model: how often the next two saves planned it, and by what error they refused it."""
    saves = Saves(cases.prepared(Recipe(layers=1, experts=2), steps=1))
    saves.save()
    norm, router = saves.parameter("final_layernorm.weight"), saves.part(".router")
    more: dict[str, Callable[[], object]] = {
        "a buffer that is none": lambda: setattr(router, "late", None),
        "a mode": lambda: setattr(norm, "_tensor_parallel_mode", "column"),
        "a mark of fusion": lambda: setattr(norm.orig_param, "partition_stride", 2),
        "a slice": lambda: setattr(norm, "megatron_fsdp_slice", slice(0, 1)),
    }
    found = {}
    with changing():
        for what, change in (changes(saves) | more).items():
            change()
            saves.plannings, refused = 0, ""
            try:
                saves.save()
                saves.save()
            except CheckpointError as error:
                refused = type(error).__name__
            found[what] = (saves.plannings, refused)
    return found
