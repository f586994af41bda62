# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a load puts back besides tensors: progress, scheduler, loss scale, RNG states.  All is checked before any is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from megatron.bridge.training import checkpointing as stock
from megatron.bridge.training.state import TrainState
from megatron.core.num_microbatches_calculator import update_num_microbatches

from mbridge_fsdp_ckpt.format.names import ARGUMENTS, PROGRESS
from mbridge_fsdp_ckpt.integrations.bridge.locate import Located
from mbridge_fsdp_ckpt.integrations.common.progress import Progress
from mbridge_fsdp_ckpt.integrations.common.restoration import generators, saved_schedule, schedule


@dataclass(frozen=True, slots=True)
class Parts:
    """Which parts of a checkpoint the configuration asks for.

    Args:
        optimizer: State of the optimizer, if the run has one.
        schedule: That of the schedule.
        random: Random-number states.
        progress: Iteration, samples and operations.
    """

    optimizer: bool
    schedule: bool
    random: bool
    progress: bool


def restoration(
    state: Any, loaded: Any, found: Located, wanted: Parts, optimizer: Any, scheduler: Any, pg_collection: Any
) -> Callable[[], None]:
    """Check progress, scheduler, loss scale and RNG states; the result puts them in place."""
    values, steps = loaded.values, list[Callable[[], None]]()
    progress = _train_state(values, found) if wanted.progress else None
    if wanted.schedule:
        steps.append(_schedule(optimizer, scheduler, values))
    if wanted.random:
        one_each, remedy = bool(state.cfg.rng.data_parallel_random_init), "Load with checkpoint.load_rng=False."
        # Bridge saves one for each rank of data and context parallelism, and reads that of the data-parallel rank
        groups = SimpleNamespace(pp=pg_collection.pp, tp=pg_collection.tp, dp=pg_collection.dp_cp)
        steps.append(generators(loaded, groups, one_a_data_rank=one_each, remedy=remedy))

    def restore() -> None:
        stock.set_checkpoint_version(values.get("checkpoint_version", 0))
        if progress is not None:
            state.train_state = progress
            update_num_microbatches(consumed_samples=progress.consumed_train_samples, verbose=True)
        if progress is None or found.release:
            state.train_state.step = 0
        for step in steps:
            step()

    return restore


def _schedule(optimizer: Any, scheduler: Any, values: Any) -> Callable[[], None]:
    remedy = "Resume with the same schedule, or set scheduler.override_opt_param_scheduler=True, which puts the "
    remedy += "configuration's in force, or scheduler.use_checkpoint_opt_param_scheduler=True, the checkpoint's."
    missing = "Load with checkpoint.load_optim=False."
    saved = None if scheduler is None else saved_schedule(values, "opt_param_scheduler", remedy=missing)
    configured = scheduler is not None and bool(scheduler.override_opt_param_scheduler)
    return schedule(optimizer, scheduler, saved, configured=configured, remedy=remedy)


def _train_state(values: Any, found: Located) -> TrainState:
    """Progress as Bridge keeps it, also of what Megatron-LM's loop saved; a release need not have any."""
    if found.release and not (PROGRESS in values or ARGUMENTS in values):
        return TrainState()
    saved = Progress.of(values, remedy="Set checkpoint.finetune=True, which loads weights alone and begins at 0.")
    restored = TrainState(step=saved.iteration, floating_point_operations_so_far=saved.operations, **saved.samples)
    if PROGRESS in values:
        restored.load_state_dict(restored.state_dict() | dict(values[PROGRESS]))  # what Bridge keeps besides
    return restored
