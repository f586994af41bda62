# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What an optimizer's kernels are handed in each training step, whatever set it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

Applied = list[tuple[float, float, float]]
"""Learning rate, weight decay and second beta of the param groups that have parameters; sorted, each once."""


@contextmanager
def applied_numbers() -> Iterator[list[Applied]]:
    """One entry a training step: such a step ends with one of Megatron's scheduler.

    Of an optimizer that holds others, those are watched: they compute.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    steps, seen = list[Applied](), set[tuple[float, float, float]]()
    end = OptimizerParamScheduler.step

    def look(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not hasattr(optimizer, "sub_optimizers"):
            seen.update(of_group(group) for group in optimizer.param_groups if group["params"])

    def ended(scheduler: Any, increment: int) -> None:
        if seen:
            steps.append(sorted(seen))
            seen.clear()
        end(scheduler, increment)

    hook = register_optimizer_step_pre_hook(look)
    try:
        with patch.object(OptimizerParamScheduler, "step", ended):
            yield steps
    finally:
        hook.remove()


def of_group(group: dict[str, Any]) -> tuple[float, float, float]:
    """The three numbers of a param group."""
    return round(float(group["lr"]), 15), round(float(group["weight_decay"]), 15), float(group["betas"][1])
