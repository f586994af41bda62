"""What a load puts back besides tensors: progress, scheduler, loss scale, RNG states.  All is checked before any is."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.bridge.training import checkpointing as stock
from megatron.bridge.training.state import TrainState
from megatron.bridge.training.utils import checkpoint_utils as names
from megatron.core.num_microbatches_calculator import update_num_microbatches

from mbridge_fsdp_ckpt.bridge.locate import Located
from mbridge_fsdp_ckpt.bridge.names import PROGRESS
from mbridge_fsdp_ckpt.hosts.restoration import generators, saved_schedule, schedule
from mbridge_fsdp_ckpt.storage.store import as_path


@dataclass(frozen=True, slots=True)
class Parts:
    """Which parts of a checkpoint the configuration asks for."""

    optimizer: bool
    random: bool
    progress: bool


def restoration(
    state: Any, loaded: Any, found: Located, wanted: Parts, optimizer: Any, scheduler: Any, pg_collection: Any
) -> Callable[[], None]:
    """Check progress, scheduler, loss scale and RNG states; the result puts them in place."""
    values, steps = loaded.values, list[Callable[[], None]]()
    progress = _read_train_state(values, found) if wanted.progress else None
    if progress is not None and state.cfg.checkpoint.load_optim:
        steps.append(_schedule(optimizer, scheduler, values))
    if wanted.random:
        one_each, remedy = bool(state.cfg.rng.data_parallel_random_init), "Load with checkpoint.load_rng=False."
        steps.append(generators(loaded, pg_collection, one_a_data_rank=one_each, remedy=remedy))

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


def _read_train_state(values: Any, found: Located) -> TrainState:
    if PROGRESS in values:
        restored = TrainState()
        restored.load_state_dict(values[PROGRESS])
        return restored
    path = as_path(names.get_checkpoint_train_state_filename(str(found.directory)))
    if path.is_file():  # a stock checkpoint keeps it beside
        restored = TrainState()
        restored.load_state_dict(torch.load(io.BytesIO(path.read_bytes()), map_location="cpu", weights_only=True))
        return restored
    return TrainState(step=int(values.get("iteration", 0)))
