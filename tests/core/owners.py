# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of who owns a number: a load as the frameworks' integrations see it, on one optimizer."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch

from mbridge_fsdp_ckpt.integrations.common.restoration import schedule
from mbridge_fsdp_ckpt.live.optimizer.adapters import adapter_for


def optimizer(rates: Any, beta: float, **bounds: float) -> torch.optim.Optimizer:
    """AdamW over a group with the names of Megatron's, and one with bounds of its own; the rates of both."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    own = {name: value * 2 for name, value in bounds.items()}
    groups: list[dict[str, Any]] = [
        {"params": [weight], "lr": rate, **limits}
        for weight, rate, limits in zip(weights, rates, (bounds, own), strict=True)
    ]
    return torch.optim.AdamW(groups, weight_decay=0.5, betas=(0.9, beta), foreach=False)


def scheduler(of: Any, rate: float, decay: float, **switches: bool) -> Any:
    """A linear schedule over 10 steps."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    rates = {"init_lr": 0.0, "max_lr": rate, "min_lr": 0.0, "lr_decay_style": "linear"}
    steps = {"lr_warmup_steps": 0, "lr_decay_steps": 10, "wd_incr_steps": 10}
    weight_decay = {"start_wd": decay, "end_wd": decay, "wd_incr_style": "constant"}
    return OptimizerParamScheduler(of, **rates, **steps, **weight_decay, **switches)


def load(owner: str, *, scheduled: bool) -> dict[str, Any]:
    """A checkpoint of max_lr 1.0, weight decay 0.25, after 5 steps, into a run that is configured otherwise.

    The run keeps its learning rate in a tensor.  The checkpoint has a multiplier that the run lacks.
    """
    saved = optimizer([1.0, 1.0], 0.75, max_lr=1.0, min_lr=0.0)
    saving = scheduler(saved, 1.0, 0.25)
    saving.step(5)
    live = optimizer([torch.tensor(0.125), torch.tensor(0.125)], 0.5, max_lr=0.125, min_lr=0.0)
    configured = owner == "configuration"
    switches = {"override_opt_param_scheduler": configured, "use_checkpoint_opt_param_scheduler": not configured}
    resuming = scheduler(live, 0.125, 0.0625, **switches) if scheduled else None
    tensors = [group["lr"].data_ptr() for group in live.param_groups]
    state = saving.state_dict() if scheduled else None
    restore = schedule(live, resuming, state, configured=configured, remedy="")
    adapter_for(live).finish([group.hyperparameters for group in adapter_for(saved).groups()])
    for group in live.param_groups:
        group["wd_mult"] = 3.0
    with redirect_stdout(StringIO()) as said:
        restore()
    return {
        "groups": [(float(group["lr"]), group["weight_decay"], group["betas"][1]) for group in live.param_groups],
        "wd_mult": [group.get("wd_mult") for group in live.param_groups],
        "stayed": tensors == [group["lr"].data_ptr() for group in live.param_groups],
        "said": said.getvalue().splitlines(),
    }
