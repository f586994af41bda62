# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a load puts back besides tensors: schedule, loss scale, random-number states.  All is checked before any is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mbridge_fsdp_ckpt.errors import KeyMismatchError
from mbridge_fsdp_ckpt.integrations.common.restoration import generators, saved_schedule, schedule

CONTENTS = "save_contents"
"""The value that lists what a checkpoint was to hold; stock VeRL's have none."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Which parts `load_contents` asks for, besides weights."""

    optimizer: bool
    random: bool


def restoration(manager: Any, loaded: Any, wanted: Parts) -> Callable[[], None]:
    """Check what was read; the result puts it in place.

    As in stock VeRL, the schedule's state is loaded with the optimizer, and only where
    `optim.use_checkpoint_opt_param_scheduler` says so.  Where it does not, the configuration owns what the param groups
    hold of the schedule, too.

    Raises:
        KeyMismatchError: The checkpoint was saved without what is asked for.
        ConfigurationError: The schedule is not the saved one.
        ManifestError: Random-number states are not what VeRL saves.
    """
    steps = list[Callable[[], None]]()
    if wanted.optimizer:
        steps.append(_schedule(manager, loaded.values))
    if wanted.random:
        steps.append(_random(loaded))

    def restore() -> None:
        for step in steps:
            step()

    return restore


def _schedule(manager: Any, values: Any) -> Callable[[], None]:
    resumes, saved = bool(manager.use_checkpoint_opt_param_scheduler), None
    remedy = "Set optim.use_checkpoint_opt_param_scheduler=False, which starts the configuration's schedule."
    if resumes and manager.lr_scheduler is not None:
        saved = saved_schedule(values, "lr_scheduler", found=_held(values), remedy=remedy)
    return schedule(manager.optimizer, manager.lr_scheduler, saved, configured=not resumes, remedy=remedy)


def _random(loaded: Any) -> Callable[[], None]:
    from megatron.core.process_groups_config import ProcessGroupCollection

    if "extra" not in loaded.values.get(CONTENTS, ["extra"]):
        raise KeyMismatchError(
            expected="random-number states, which 'extra' in load_contents asks for",
            found=_held(loaded.values),
            remedy="Load a checkpoint that was saved with them.",
            key="rng_state",
        )
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "pp", "dp"])
    remedy = "Remove 'extra' from checkpoint.load_contents."
    return generators(loaded, groups, one_a_data_rank=False, remedy=remedy)


def _held(values: Any) -> str:
    if "opt_param_scheduler" in values:
        return "that of Bridge or Megatron-LM, which counts samples where VeRL counts steps"
    return f"a checkpoint saved with save_contents={values[CONTENTS]}" if CONTENTS in values else "none"
