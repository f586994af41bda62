# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of tensors that a captured graph reads: it knows them by their address."""

from __future__ import annotations

import json
from typing import Any

import torch

from mbridge_fsdp_ckpt.format.values import decode, encode
from mbridge_fsdp_ckpt.integrations.common.restoration import schedule
from mbridge_fsdp_ckpt.live.optimizer.adapters import adapter_for
from mbridge_fsdp_ckpt.live.optimizer.base import STEP
from testing.kernels import replace_cuda_only_kernels
from testing.ranks import no_process_group


def torch_adam(lr: Any, steps: int) -> Any:
    """torch's AdamW after some steps on one weight, with a learning rate in a tensor or a number."""
    weight = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = torch.optim.AdamW([weight], lr=lr, foreach=False)
    for _ in range(steps):
        weight.grad = torch.rand(4, 3)
        optimizer.step()
    return optimizer


def fused_adam(lr: float, steps: int, *, capturable: bool, **settings: Any) -> Any:
    """FusedAdam as it is after some steps: its own kernels need a GPU."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    replace_cuda_only_kernels()
    weight = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = FusedAdam([weight], lr=lr, capturable=capturable, **settings)
    if steps:
        optimizer.initialize_state(weight, False)
        for name in ("exp_avg", "exp_avg_sq"):
            optimizer.set_scaled_state(weight, name, torch.rand(4, 3))
        optimizer.param_groups[0][STEP] = torch.tensor([steps], dtype=torch.int32) if capturable else steps
    return optimizer


def transfer(saved: Any, live: Any) -> None:
    """What a save and a load do with one optimizer's state, through JSON."""
    (source,), (target,) = saved.param_groups[0]["params"], live.param_groups[0]["params"]
    reading, filling = adapter_for(saved), adapter_for(live)
    groups = [decode(json.loads(json.dumps(encode(group.hyperparameters)))) for group in reading.groups()]
    stored = reading.slots(source)
    slots = filling.allocate(target, filling.expected(target, None) or {})
    for name, slot in slots.items():
        slot.tensor.copy_(stored[name].tensor if name in stored else torch.zeros(()))
    counted = stored[STEP].tensor if STEP in stored else groups[0][STEP]
    filling.install(target, slots, float(counted))
    filling.finish(groups)


def tensors(optimizer: Any) -> dict[str, torch.Tensor]:
    """Every tensor that a step reads besides the weight and its gradient."""
    (group,), (state,) = optimizer.param_groups, optimizer.state.values()
    return {name: value for name, value in (group | state).items() if isinstance(value, torch.Tensor)}


def _pairs(name: str) -> tuple[Any, Any]:
    if "torch Adam" in name:
        saved, live = torch_adam(torch.tensor(0.25), 3), torch_adam(torch.tensor(0.5), 1)
        live.param_groups[0]["capturable"] = "captured" in name  # no step on the host with it
        return saved, live
    settings = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16} if "bf16" in name else {}
    return tuple(fused_adam(lr, steps, capturable=True, **settings) for lr, steps in ((0.25, 3), (0.5, 1)))


@no_process_group
def load_captured(name: str) -> dict[str, Any]:
    """Whether each tensor stayed where it was, and has the saved values."""
    saved, live = _pairs(name)
    before = {name: tensor.data_ptr() for name, tensor in tensors(live).items()}
    transfer(saved, live)
    expected = tensors(saved)
    stayed = {name: tensor.data_ptr() == before[name] for name, tensor in tensors(live).items()}
    equal = {name: torch.equal(tensor, expected[name]) for name, tensor in tensors(live).items()}
    return {"stayed": stayed, "equal": equal}


@no_process_group
def load_otherwise() -> list[Any]:
    """Learning rate and counter where the loading optimizer keeps them otherwise, or has not stepped yet."""
    found = []
    for saved, live in (
        (torch_adam(torch.tensor(0.25), 3), torch_adam(0.5, 1)),
        (torch_adam(0.25, 3), torch_adam(torch.tensor(0.5), 1)),
        (fused_adam(0.25, 3, capturable=True), fused_adam(0.5, 0, capturable=True)),
        (fused_adam(0.25, 3, capturable=True), fused_adam(0.5, 0, capturable=False)),
        (fused_adam(0.25, 3, capturable=False), fused_adam(0.5, 0, capturable=True)),
        (torch_adam(0.25, 3), fused_adam(0.5, 0, capturable=True)),
        (fused_adam(0.25, 3, capturable=True), torch_adam(0.5, 0)),
    ):
        transfer(saved, live)
        (group,), (state,) = live.param_groups, live.state.values()
        found.append([_shown(group["lr"]), _shown(state[STEP] if STEP in state else group[STEP])])
    return found


def _shown(value: Any) -> Any:
    return [str(value.dtype), value.tolist()] if isinstance(value, torch.Tensor) else value


@no_process_group
def kernels_of_the_live_optimizer() -> dict[str, Any]:
    """How torch's kernels run is a matter of the job, not of the checkpoint."""
    saved, live = torch_adam(0.25, 1), torch_adam(0.5, 1)
    chosen = {"foreach": True, "fused": True, "capturable": True, "differentiable": True}
    saved.param_groups[0].update(chosen)
    transfer(saved, live)
    group = live.param_groups[0]
    return {name: group[name] for name in ("lr", *chosen)}


@no_process_group
def try_a_schedule() -> list[float]:
    """The live learning rate while a saved schedule is checked, and once it is put in place."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    settings: dict[str, Any] = {
        "init_lr": 0.0,
        "max_lr": 1.0,
        "min_lr": 0.0,
        "lr_warmup_steps": 0,
        "lr_decay_steps": 10,
    }
    settings |= {"lr_decay_style": "linear", "start_wd": 0.0, "end_wd": 0.0, "wd_incr_steps": 10}
    settings |= {"wd_incr_style": "constant", "use_checkpoint_opt_param_scheduler": False}
    optimizer = torch_adam(torch.tensor(0.5), 0)
    scheduler = OptimizerParamScheduler(optimizer, **settings)
    other = OptimizerParamScheduler(torch_adam(0.5, 0), **settings)
    other.step(5)
    found = [float(optimizer.param_groups[0]["lr"])]
    restore = schedule(optimizer, scheduler, other.state_dict(), configured=False, remedy="")
    found.append(float(optimizer.param_groups[0]["lr"]))
    restore()
    return [*found, float(optimizer.param_groups[0]["lr"])]
