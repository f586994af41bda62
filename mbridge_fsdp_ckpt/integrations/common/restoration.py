# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a load brings besides tensors: each function checks it first, and returns what puts it in place."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel

from mbridge_fsdp_ckpt.errors import ConfigurationError, KeyMismatchError, ManifestError
from mbridge_fsdp_ckpt.integrations.common.options import warn
from mbridge_fsdp_ckpt.live.optimizer.adapters import adapters_for
from mbridge_fsdp_ckpt.live.optimizer.base import STEP, restored

SCHEDULED = frozenset(
    {
        *("lr", "initial_lr", "max_lr", "min_lr", "lr_mult", "is_decoupled_lr", "default_config"),
        *("weight_decay", "start_wd", "end_wd", "wd_mult"),
    }
)
"""Numbers of a param group that Megatron's scheduler computes, or reads before its own of that name."""


def saved_schedule(values: Mapping[str, Any], key: str, *, found: str = "none", remedy: str) -> dict[str, Any]:
    """A schedule's state among a checkpoint's values.

    Raises:
        KeyMismatchError: There is none: the schedule would start again, whoever owns its numbers.
    """
    if key not in values:
        raise KeyMismatchError(expected="the schedule's state in the checkpoint", found=found, remedy=remedy, key=key)
    return dict(values[key])


def schedule(
    optimizer: Any, scheduler: Any, saved: dict[str, Any] | None, *, configured: bool, remedy: str
) -> Callable[[], None]:
    """Learning rate, weight decay and all that they are computed from, with one owner in force at the first step.

    Call it before the load changes anything: it keeps the configuration's numbers, which are in the live param groups.
    The load then replaces those by the checkpoint's.  The result puts back what the configuration owns, and lets the
    scheduler compute again from what is in force: its own `load_state_dict` computes before it has set weight decay.

    The state is tried on a copy whose param groups are copies: Megatron's scheduler compares its settings.

    Args:
        optimizer: Megatron's; None where its state is not loaded.
        scheduler: Megatron's; None where the run has none.
        saved: The scheduler's state in the checkpoint; None to leave the live one where it stands.
        configured: Whether the configuration owns `SCHEDULED`.  Otherwise the checkpoint does.  It owns the optimizer's
            other hyperparameters in either case.  A warning names those that are configured otherwise.
        remedy: How a user resumes with another schedule.

    Raises:
        ConfigurationError: The scheduler refuses the saved state.
    """
    if scheduler is not None:
        trial = copy.copy(scheduler)
        trial.optimizer = SimpleNamespace(param_groups=[_copied(group) for group in scheduler.optimizer.param_groups])
        try:
            _compute(trial, saved)
        except (AssertionError, ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                expected="the schedule that was saved",
                found=f"{type(error).__name__}: {error}",
                remedy=remedy,
                key="opt_param_scheduler",
            ) from error
    live = [] if optimizer is None else [_copied(group) for group in optimizer.param_groups]
    before = _numbers(live, scheduler)

    def restore() -> None:
        groups = [] if optimizer is None else optimizer.param_groups
        if configured:
            for group, own in zip(groups, live, strict=True):
                _put_back(group, own)
        if scheduler is not None:
            _compute(scheduler, saved)
        for adapter in [] if optimizer is None else adapters_for(optimizer):
            adapter.finish(None)  # optimizers inside of others have copies of the groups
        _tell_what_differs(before, _numbers(groups, scheduler))

    return restore


def _compute(scheduler: Any, saved: dict[str, Any] | None) -> None:
    """Set a scheduler, and what it computes in the param groups."""
    if saved is not None:
        scheduler.num_steps = 0  # Megatron's `load_state_dict` adds the saved steps to those that were counted
        scheduler.load_state_dict(saved)
    scheduler.step(0)


def _put_back(group: dict[str, Any], own: dict[str, Any]) -> None:
    for name in SCHEDULED & group.keys() - own.keys():
        del group[name]
    for name in SCHEDULED & own.keys():
        group[name] = restored(group.get(name), own[name])


def _numbers(groups: list[dict[str, Any]], scheduler: Any) -> list[dict[str, Any]]:
    """What is configured, or in force: of each param group, and of the scheduler; without what changes by itself."""
    changing = {"params", STEP} | (set() if scheduler is None else {"lr", "weight_decay", "num_steps"})
    found = [*groups, {} if scheduler is None else scheduler.state_dict()]
    return [{name: value for name, value in numbers.items() if name not in changing} for numbers in found]


def _tell_what_differs(configured: list[dict[str, Any]], in_force: list[dict[str, Any]]) -> None:
    """Name the numbers that are configured otherwise, and not the configuration's."""
    differ = {
        f"{name} {_shown(now[name])} (configured: {_shown(own[name])})"
        for own, now in zip(configured, in_force, strict=True)
        for name in own.keys() & now.keys()
        if _shown(own[name]) != _shown(now[name])
    }
    if differ:
        warn(f"the checkpoint's numbers are in force, not the configuration's: {', '.join(sorted(differ))}")


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    return str(tuple(value) if isinstance(value, list) else value)


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    """A learning rate in a tensor is filled where it is, so that too."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in group.items()}


def generators(loaded: Any, groups: Any, *, one_a_data_rank: bool, remedy: str) -> Callable[[], None]:
    """The random-number states that this rank is to get.

    A rank that finds its own coordinates in the checkpoint gets its own states.  Another data-parallel layout gives
    the states of the first rank at the same (pipeline, tensor) place, as Bridge does; where data-parallel ranks draw
    different numbers, that would give several the same, and those beyond the saved ones stay as the run seeded them, as
    in Bridge and Megatron-LM.  At another tensor- or pipeline-parallel size no saved state fits, and all stay so.  What
    stays is said.

    Args:
        loaded: What `checkpoint.load` read.
        groups: Megatron's process groups: tp, pp, dp.
        one_a_data_rank: Whether data-parallel ranks draw different numbers (`data_parallel_random_init`).
        remedy: How a user leaves the states out.

    Raises:
        ManifestError: The states are not what Megatron saves, or belong to other generators.
    """
    saved = _states_at_place(loaded, groups)
    if saved is None:
        return _say_that_none_fits
    if one_a_data_rank and groups.dp.size() > len(saved):
        warn(f"RNG states of {len(saved)} data-parallel ranks were saved: generators of the others stay as seeded")
    place = groups.dp.rank() if one_a_data_rank else 0
    if place >= len(saved):
        return _nothing
    state = saved[place]
    try:
        random.Random().setstate(state["random_rng_state"])
        np.random.RandomState().set_state(state["np_rng_state"])
        _check_like(state["torch_rng_state"], torch.get_rng_state())
        _check_like(state["cuda_rng_state"], torch.cuda.get_rng_state())
        tracker = tensor_parallel.get_cuda_rng_tracker()
        graphable = tensor_parallel.is_graph_safe_cuda_rng_tracker(tracker)
        tracked = {
            name: tensor_parallel.convert_cuda_rng_state(value, to_graphable=graphable)
            for name, value in state["rng_tracker_states"].items()
        }
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ManifestError(
            expected="RNG states as Megatron saves them", found=f"{type(error).__name__}: {error}", remedy=remedy
        ) from error

    def restore() -> None:
        random.setstate(state["random_rng_state"])
        np.random.set_state(state["np_rng_state"])
        torch.set_rng_state(state["torch_rng_state"])
        torch.cuda.set_rng_state(state["cuda_rng_state"])
        tracker.set_states(tracked)

    return restore


def _nothing() -> None:
    """What puts in place nothing."""


def _say_that_none_fits() -> None:
    warn("no saved RNG state fits this layout: generators stay as seeded")


def _check_like(saved: torch.Tensor, live: torch.Tensor) -> None:
    if saved.dtype != live.dtype or saved.shape != live.shape:
        raise ValueError(f"a generator state of {saved.dtype} {list(saved.shape)}, not {live.dtype} {list(live.shape)}")


def _states_at_place(loaded: Any, groups: Any) -> list[Any] | None:
    place = f"({groups.pp.rank()}, {groups.tp.rank()})"
    sizes = (("tensor", groups.tp.size()), ("pipeline", groups.pp.size()))
    if any(loaded.topology.get(name, size) != size for name, size in sizes):
        return None
    record = loaded.nearest
    states = record.values.get("rng_state", {}).get(place) if record is not None else None
    return list(states) if states else None
