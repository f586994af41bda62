# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The same small model, trained by each framework's own loop: what it says of its progress, and where generators stand.

    Megatron-LM    batches of 4, 4 and 8 samples, of which the second is skipped
    Bridge         batches of 4 samples, of which the second is skipped
    VeRL           two steps

What a loop goes on from is looked at where the framework uses it, not in what this package returns.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from io import StringIO
from typing import Any
from unittest.mock import patch

import torch

from mbridge_fsdp_ckpt.integrations.common.after_import import AfterImport
from mbridge_fsdp_ckpt.patching import Patches
from testing.ranks import no_process_group
from tests.bridge import training
from tests.bridge.training import Run
from tests.core.oracle import digest
from tests.megatron_lm import running
from tests.upstream import is_before
from tests.verl import cases, layers, tiny
from tests.verl.tiny import Setup

SAFE, STOCK = "fsdp_dtensor_safe", "fsdp_dtensor"
GROWING = (
    ("--rampup-batch-size", "4", "4", "8")
    if is_before("megatron-core", "0.19")
    else ("--step-batch-size-schedule", "0:4 256:8")  # in tokens; a sample has 32
)
"""4 samples a batch as long as fewer than 8 were consumed, then 8."""

_DENSE = {
    "model.num_layers": 2,
    "model.ffn_hidden_size": 48,
    "model.num_moe_experts": None,
    "model.moe_ffn_hidden_size": None,
    "model.moe_shared_expert_intermediate_size": None,
    "model.transformer_layer_spec": layers.dense_layers,
    "scheduler.override_opt_param_scheduler": True,
}


@contextmanager
def _removed_at_the_end(hook: Any) -> Iterator[None]:
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _watched() -> Iterator[dict[str, Any]]:
    """The last state of torch's generator that was read, and set; and where the first step found its schedule."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    seen: dict[str, Any] = {}
    read, put, step = torch.get_rng_state, torch.set_rng_state, OptimizerParamScheduler.step

    def reading() -> torch.Tensor:
        state = read()
        seen["random read"] = digest(state)
        return state

    def putting(state: torch.Tensor) -> None:
        seen["random set"] = digest(state)
        put(state)

    def stepping(scheduler: Any, increment: int) -> None:
        if "trains" in seen and "counted" not in seen:  # a load steps it, too
            seen["counted"], seen["args"] = scheduler.num_steps, _arguments()
        step(scheduler, increment)

    hook = register_optimizer_step_pre_hook(lambda *_: seen.update(trains=True))
    with (
        _removed_at_the_end(hook),
        patch.object(torch, "get_rng_state", reading),
        patch.object(torch, "set_rng_state", putting),
        patch.object(OptimizerParamScheduler, "step", stepping),
    ):
        yield seen


def _arguments() -> dict[str, Any]:
    """Megatron-LM's own, where its loop runs."""
    module = sys.modules.get("megatron.training.global_vars")
    args = vars(getattr(module, "_GLOBAL_ARGS", None) or object)
    return {name: args[name] for name in args if "samples" in name or name.endswith(("iteration", "so_far"))}


@contextmanager
def _as_of_the_next_releases() -> Iterator[None]:
    """Seams answer as they will there: of Megatron-Core 0.20, and of Bridge 0.7."""
    patches = Patches()
    seams = {
        "mbridge_fsdp_ckpt.integrations.megatron_lm.checkpointing": "_goes_by_samples",
        "mbridge_fsdp_ckpt.integrations.bridge.differences": "starts_with_fresh_optimizer",
    }
    hook = AfterImport(
        {name: lambda module: patches.set(module, seams[module.__name__], lambda: True) for name in seams}
    )
    hook.install()
    try:
        yield
    finally:
        hook.uninstall()
        patches.undo()


@no_process_group
def megatron_lm(
    kind: str, directory: str, iterations: int, *more: str, load: bool = True, newer: bool = False
) -> dict[str, Any]:
    """Megatron-LM's loop."""
    with _watched() as seen, _as_of_the_next_releases() if newer else nullcontext():
        result = running.pretrain(kind, directory, iterations, *more, save_every=3, load=load)
    return result | {"seen": seen}


@no_process_group
def bridge(run: Run, *, newer: bool = False) -> dict[str, Any]:
    """Bridge's loop."""
    said = StringIO()
    with ExitStack() as stack:
        seen = stack.enter_context(_watched())
        if newer:
            stack.enter_context(_as_of_the_next_releases())
            stack.enter_context(redirect_stdout(said))
        result = training.train(run.on(config=_DENSE | run.config))
    return result | {"seen": seen, "said": said.getvalue()}


def verl(setup: Setup, steps: int, save_at: tuple[int, ...] = ()) -> dict[str, Any]:
    """VeRL's engine and its handler of checkpoints."""
    with _watched() as seen:
        result = cases.train(setup, steps, save_at)
    return result | {"seen": seen}


def write_model(directory: str) -> None:
    """What VeRL begins with."""
    tiny.write_dense_model(directory)
