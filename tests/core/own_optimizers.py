# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of optimizers that this package does not know: classes of somebody's own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt import Settings
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.live.tensors import local_shard
from testing.models import Recipe, Trainable
from tests.core import cases, oracle

MODEL = Recipe(layers=1)


class Own(torch.optim.Optimizer):
    """Keeps what `keep` puts into a parameter's state, and moves the parameter a little."""

    def __init__(self, params: Any, keep: Callable[[Own, dict[str, Any], Any, Any], None]) -> None:
        super().__init__(params, {"lr": 0.01, "weight_decay": 0.0})
        self.keep, self.steps = keep, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.keep(self, self.state[parameter], parameter, group)


class Lion(Own):
    """Another class that may keep the same."""


def moments(optimizer: Any, state: Any, parameter: Any, group: Any) -> None:
    """A momentum, and a counter that the group has from the first step on."""
    group["step"] = optimizer.steps
    state.setdefault("exp_avg", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
    parameter.sub_(state["exp_avg"].sign(), alpha=group["lr"])


def weights(optimizer: Any, state: Any, parameter: Any, group: Any) -> None:
    """A sequence of weights beside the weights, from which these are computed, as schedule-free optimizers do."""
    state.setdefault("z", parameter.clone()).sub_(parameter.grad, alpha=group["lr"])
    parameter.copy_(state["z"])


def preconditioner(optimizer: Any, state: Any, parameter: Any, group: Any) -> None:
    """A square matrix with as many elements as this rank's shard of it, where there is one."""
    count = local_shard(parameter).numel()
    side = round(count**0.5)
    if side * side == count:
        state["left"] = torch.eye(side)


def keeping(name: object) -> Callable[[Any, Any, Any, Any], None]:
    """A number under a name."""

    def keep(optimizer: Any, state: Any, parameter: Any, group: Any) -> None:
        state[name] = 1.0

    return keep


def something_global(optimizer: Any, state: Any, parameter: Any, group: Any) -> None:
    """State of the optimizer as a whole."""
    optimizer.state["global"] = {"count": 3}


def prepared(kind: type[Own], keep: Callable[..., None], steps: int, seed: int = 123) -> Trainable:
    """A model with such an optimizer, after some steps."""
    trainable = cases.prepared(MODEL, seed=seed)
    given = trainable.optimizer.optimizer
    trainable.optimizer.optimizer = kind([p for group in given.param_groups for p in group["params"]], keep)
    for number in range(steps):
        trainable.step(number)
    return trainable


def refused_saves(directory: str) -> dict[str, str]:
    """What the save says of state that could not come back."""
    found = {}
    for name, keep in {
        "a preconditioner": preconditioner,
        "a number as a name": keeping(1),
        "a dot in a name": keeping("m.1"),
        "global state": something_global,
    }.items():
        trainable = prepared(Own, keep, steps=1)
        try:
            mbridge_fsdp_ckpt.save(directory, model=trainable.model, optimizer=trainable.optimizer)
            found[name] = "saved"
        except CheckpointError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def save(directory: str, kind: type[Own], keep: Callable[..., None]) -> dict[str, Any]:
    """Two steps, a save."""
    trainable = prepared(kind, keep, steps=2)
    mbridge_fsdp_ckpt.save(directory, model=trainable.model, optimizer=trainable.optimizer)
    return {"live": oracle.live(trainable), "step": trainable.optimizer.optimizer.param_groups[0].get("step")}


def load(directory: str, kind: type[Own], keep: Callable[..., None]) -> dict[str, Any]:
    """A load into an optimizer that has not stepped; then, a step.  Or the error, and then nothing has changed."""
    trainable = prepared(kind, keep, steps=0, seed=9)
    before = oracle.live(trainable)
    try:
        mbridge_fsdp_ckpt.load(directory, model=trainable.model, optimizer=trainable.optimizer)
    except CheckpointError as error:
        assert oracle.live(trainable) == before
        return {"error": f"{type(error).__name__}: {error}"}
    found = oracle.live(trainable)
    counted = trainable.optimizer.optimizer.param_groups[0].get("step")
    return {"live": found, "step": counted, "loss": trainable.step(2)}


def load_weights(directory: str) -> dict[str, Any]:
    """A load of weights alone into a model whose optimizer keeps weights: what it says."""
    trainable = prepared(Own, weights, steps=1, seed=9)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mbridge_fsdp_ckpt.loading").addHandler(handler)
    loaded = mbridge_fsdp_ckpt.load_weights(directory, model=trainable.model, optimizer=trainable.optimizer)
    return {"unknown": loaded.unknown_slots, "said": said}


def cast(directory: str, patterns: tuple[str, ...]) -> str:
    """A checkpoint of fp32 moments, loaded into moments in bf16; "" or the error."""
    settings = {
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
    }
    recipe = MODEL.on(optimizer="auto", optimizer_settings=settings, ddp={"megatron_fsdp_use_decoupled_grad": True})
    trainable = cases.prepared(recipe, seed=9)
    before = oracle.live(trainable)
    chosen = Settings(allow_cast=patterns)
    try:
        mbridge_fsdp_ckpt.load(directory, model=trainable.model, optimizer=trainable.optimizer, settings=chosen)
    except CheckpointError as error:
        assert oracle.live(trainable) == before
        return f"{type(error).__name__}: {error}"
    return ""


def without_momentum(directory: str, patterns: tuple[str, ...]) -> str:
    """A checkpoint of AdamW, loaded into SGD that keeps nothing, by ranks that read for each other; "" or the error."""
    trainable = cases.prepared(MODEL.on(strategy="no_shard"), seed=9)
    given = trainable.optimizer.optimizer
    groups = [{"params": group["params"]} for group in given.param_groups]
    trainable.optimizer.optimizer = torch.optim.SGD(groups, lr=0.01)
    chosen = Settings(allow_unexpected=patterns, share_reads="always")
    try:
        mbridge_fsdp_ckpt.load(directory, model=trainable.model, optimizer=trainable.optimizer, settings=chosen)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    assert not any(trainable.optimizer.optimizer.state.values())
    trainable.step(2)
    return ""


def masters_over_fp32(directory: str) -> list[float]:
    """FusedAdam's masters of fp32 weights, loaded where the host keeps copies: how far these are from the weights."""
    import megatron.core.optimizer as megatron_optimizer

    plain = megatron_optimizer.Adam

    def with_masters(*args: Any, **settings: Any) -> Any:
        return plain(*args, **settings, master_weights=True)

    megatron_optimizer.Adam = with_masters
    try:
        saved = cases.prepared(MODEL.on(optimizer="auto"), steps=1)
    finally:
        megatron_optimizer.Adam = plain
    mbridge_fsdp_ckpt.save(directory, model=saved.model, optimizer=saved.optimizer)
    live = cases.prepared(MODEL.on(offload=1.0), seed=9)
    mbridge_fsdp_ckpt.load(directory, model=live.model, optimizer=live.optimizer)
    pairs = live.optimizer.optimizer.param_to_inner_param.items()
    return [float((local_shard(p) - local_shard(inner)).abs().max()) for p, inner in pairs if local_shard(p).numel()]


def left_out_counters(directory: str) -> str:
    """A checkpoint from before the first step, of half of a param group that FusedAdam has stepped; the error."""
    saved = cases.prepared(MODEL.on(optimizer="auto"))
    mbridge_fsdp_ckpt.save(directory, model=saved.model, optimizer=saved.optimizer)
    live = cases.prepared(MODEL.on(optimizer="auto"), steps=2, seed=9)
    before = oracle.live(live)
    try:
        mbridge_fsdp_ckpt.load(
            directory, model=live.model, optimizer=live.optimizer, include=lambda key: "linear_fc1" in key
        )
    except CheckpointError as error:
        assert oracle.live(live) == before
        return f"{type(error).__name__}: {error}"
    return "loaded"


def without_amsgrad(directory: str) -> dict[str, Any]:
    """A checkpoint of AdamW with amsgrad, loaded without its third slot, as the user allows; then a step."""
    saved, live = (_with(torch.optim.AdamW, seed, amsgrad=amsgrad) for seed, amsgrad in ((8, True), (9, False)))
    saved.step(0)
    mbridge_fsdp_ckpt.save(directory, model=saved.model, optimizer=saved.optimizer)
    chosen = Settings(allow_unexpected=("*.max_exp_avg_sq",))
    mbridge_fsdp_ckpt.load(directory, model=live.model, optimizer=live.optimizer, settings=chosen)
    return {"amsgrad": live.optimizer.optimizer.param_groups[0]["amsgrad"], "loss": live.step(1)}


def _with(kind: Any, seed: int, **settings: Any) -> Trainable:
    """A model with an optimizer over the param groups that Megatron makes."""
    trainable = cases.prepared(MODEL, seed=seed)
    groups = [{"params": group["params"]} for group in trainable.optimizer.optimizer.param_groups]
    trainable.optimizer.optimizer = kind(groups, lr=0.01, **settings)
    return trainable


def of_other_classes(directory: str) -> list[str]:
    """Checkpoints of SGD that keeps nothing, and of Adam, loaded into AdamW: errors, and whether its rule stays."""
    said = []
    for kind, settings in (
        (torch.optim.SGD, Settings()),
        (torch.optim.SGD, Settings(allow_missing=("optimizer.*",))),
        (torch.optim.Adam, Settings()),
    ):
        saved, live = _with(kind, 8), _with(torch.optim.AdamW, 9)
        saved.step(0)
        mbridge_fsdp_ckpt.save(directory, model=saved.model, optimizer=saved.optimizer)
        before = oracle.live(live)
        try:
            mbridge_fsdp_ckpt.load(directory, model=live.model, optimizer=live.optimizer, settings=settings)
        except CheckpointError as error:
            assert oracle.live(live) == before
            said.append(f"{type(error).__name__}: {error}")
        else:
            decoupled = {group["decoupled_weight_decay"] for group in live.optimizer.optimizer.param_groups}
            said.append(f"loaded, decoupled: {decoupled}")
    return said


class MyAdamW(torch.optim.AdamW):
    """A class of somebody's own that keeps what torch's keeps."""


def into_a_subclass(directory: str) -> float:
    """A checkpoint of AdamW, loaded into such a class; the loss of a step."""
    trainable = _with(MyAdamW, 9)
    mbridge_fsdp_ckpt.load(directory, model=trainable.model, optimizer=trainable.optimizer)
    return trainable.step(2)
