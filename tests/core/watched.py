# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of models that change between saves, and between the call of one and its copy."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from mbridge_fsdp_ckpt import checkpoint
from mbridge_fsdp_ckpt.errors import ChangedTensorError
from mbridge_fsdp_ckpt.live.readers.megatron_fsdp import find_fsdp_module
from mbridge_fsdp_ckpt.live.tensors import local_shard
from mbridge_fsdp_ckpt.saving.background.filling import Filling
from mbridge_fsdp_ckpt.saving.background.order import Order
from mbridge_fsdp_ckpt.saving.snapshot import _check, observe, plan_save
from testing.models import Recipe
from tests.core import cases, oracle
from tests.core.beside import PATIENT, SMALL, Run
from tests.soak.kill import iteration

Change = Callable[[], object]


class Watching(Run):
    """A rank that trains, saves beside that, and changes otherwise than by training.

    Args:
        root: Where its checkpoints go.
        recipe: Its model.
    """

    def __init__(self, root: str, recipe: Recipe = SMALL) -> None:
        super().__init__(root, recipe, PATIENT)
        self.router = self.part("decoder")
        self.router.register_buffer("counted", torch.zeros(2))
        self.router.child = torch.nn.Identity()
        self.warm()

    @property
    def module(self) -> Any:
        return find_fsdp_module(self.trainable.model)

    def part(self, name: str) -> Any:
        return next(part for key, part in self.module.named_modules() if key.endswith(name))

    @property
    def weight(self) -> Any:
        """The last parameter that has something here, as the optimizer updates it."""
        parameters = self.trainable.optimizer.param_groups[0]["params"]
        return [parameter for parameter in parameters if local_shard(parameter).numel()][-1]

    @property
    def state(self) -> Any:
        """What torch's AdamW keeps of it."""
        return self.trainable.optimizer.optimizer.state[self.weight]

    def saved(self, change: Change, at: Any = None) -> list[Any]:
        """What a save comes to that a change goes before, or comes into; whether it has what weights and slots were."""
        with held(at) as go_on:
            wanted = oracle.live(self.trainable)
            if at is None:
                change()
            try:
                self.save()
                if at is not None:
                    change()
            finally:
                go_on()
            found = self.ended()
        if found["error"]:
            return [found["error"], found["key"], found["rank"], found["found"]]
        stored = oracle.on_disk(iteration(self.root, self.number))
        return [None, {key: stored.get(key) for key in wanted} == wanted]


@contextmanager
def held(at: str | None) -> Iterator[Callable[[], None]]:
    """Before it plans, or before it copies, the thread of a save waits until it may go on."""
    may_go_on = threading.Event()
    owner: Any = {"planned": Order, "add": Filling}.get(at or "", SimpleNamespace)
    plain = getattr(owner, at or "", None)

    def waiting(*arguments: Any) -> Any:
        assert may_go_on.wait(PATIENT.time_limit / 2)
        return plain(*arguments)  # type: ignore[misc]

    if at is None:
        yield may_go_on.set
        return
    with patch.object(owner, at, waiting):
        yield may_go_on.set


def between_saves(root: str) -> dict[str, Any]:
    """By what changed while nothing went on: what the next save comes to, and whether it has all weights and slots."""
    run = Watching(root)
    norm = run.part("final_layernorm")
    weight = norm.weight
    more: dict[str, Change] = {
        "nothing": lambda: None,
        "a module is removed": lambda: delattr(run.router, "child"),
        "a module is added": lambda: setattr(run.router, "other", torch.nn.Identity()),
        "a buffer is added": lambda: run.router.register_buffer("more", torch.ones(3)),
        "a buffer is put into a dictionary": lambda: run.router._buffers.update(put=torch.ones(2)),
        "a buffer is removed": lambda: delattr(run.router, "more"),
        "a buffer is another one": lambda: setattr(run.router, "counted", torch.ones(2, dtype=torch.float64)),
        "a buffer has two places": lambda: norm.register_buffer("counted", run.router.counted),
        "one of them is another one": lambda: setattr(norm, "counted", torch.full((2,), 3.0)),
        "a parameter is replaced": lambda: setattr(norm, "weight", torch.nn.Parameter(torch.ones(1))),
    }
    found = {what: run.saved(change)[:2] for what, change in more.items()}
    norm.weight = weight
    return {**found, "it is put back": run.saved(lambda: None)}


def between_call_and_copy(root: str) -> dict[str, Any]:
    """By what changed, and before what: what that save comes to, the training that goes on, and the next save."""
    run, found = Watching(root), {}

    def in_place() -> None:
        with torch.no_grad():
            run.weight.add_(1)

    def loaded() -> None:
        run.module.state_dict(keep_vars=True)  # the parameters that the optimizer updates are in their modules
        run.part("final_layernorm").load_state_dict(run.part("final_layernorm").state_dict())

    def replaced() -> None:
        run.state["exp_avg"] = run.state["exp_avg"].clone()

    changes: dict[str, tuple[Change, str]] = {
        "a weight": (in_place, "planned"),
        "a weight, later": (in_place, "add"),
        "a weight, by load_state_dict": (loaded, "add"),
        "a slot": (lambda: run.state["exp_avg"].mul_(2), "add"),
        "a counter": (lambda: run.state["step"].add_(1), "planned"),
        "a slot that is another one": (replaced, "planned"),
        "a buffer": (lambda: run.router.counted.add_(1), "planned"),
        "a module": (lambda: delattr(run.router, "child"), "planned"),
    }
    for what, (change, at) in changes.items():
        before = iteration(root, run.number)
        outcome = run.saved(change, at)
        stands = oracle.on_disk(before) != {}
        run.step()
        found[what] = [*outcome, stands, Path(iteration(root, run.number)).exists(), run.saved(lambda: None)]
    return found


def replayed(root: str) -> dict[str, Any]:
    """Whether a call that comes back has all copied: by how the optimizer steps."""
    run, add, found = Watching(root), Filling.add, {}

    def slow(*arguments: Any) -> None:
        time.sleep(0.02)
        add(*arguments)

    def is_taken(**more: Any) -> bool:
        with patch.object(Filling, "add", slow):
            saving = checkpoint.async_save(
                iteration(root, run.number), model=run.trainable.model, settings=PATIENT, **more
            )
            taken = saving.taken
            saving.result()
        return taken

    optimizer = run.trainable.optimizer
    from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper

    optimizer.step = OptimizerCudaGraphWrapper(optimizer.step, cuda_graph_warmup_steps=sys.maxsize)
    found["not captured"] = is_taken(optimizer=optimizer)
    optimizer.config.optimizer_cuda_graph = True
    found["configured"] = is_taken(optimizer=optimizer)
    run.step()
    found["stepped, weights alone"] = is_taken()
    with patch.object(OptimizerCudaGraphWrapper, "cuda_graph", object()):  # a graph needs a device
        found["captured, weights alone"] = is_taken()
    optimizer.config.optimizer_cuda_graph = False
    found["put back"] = is_taken(optimizer=optimizer)
    optimizer.optimizer.param_groups[0]["capturable"] = True
    found["capturable"] = is_taken(optimizer=optimizer)
    return found


def trains(recipes: list[Recipe]) -> dict[str, tuple[int, list[str]]]:
    """By recipe: so many tensors that a save watches, and those that a forward and backward pass seem to change."""
    found = {}
    for recipe in recipes:
        trainable = cases.prepared(recipe, steps=2)
        frozen = next(p for group in trainable.optimizer.param_groups for p in group["params"])
        frozen.requires_grad_(requires_grad=False)
        prepared = plan_save(observe(trainable.model, trainable.optimizer, None, None).with_buffers_copied())
        with patch.object(trainable.optimizer, "step"):
            for number in (2, 3):
                trainable.step(number)
        changed = []
        for shard in (*prepared.shards, *prepared.numbers):
            try:
                _check(shard, prepared.watched)
            except ChangedTensorError as error:
                changed.append(f"{error.key}: {error.found}")
        watched = [shard for shard in (*prepared.shards, *prepared.numbers) if shard.kept is not None]
        found[str(recipe)] = len(watched), changed
    return found
