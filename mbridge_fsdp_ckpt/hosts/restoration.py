"""What a load brings besides tensors: each function checks it first, and returns what puts it in place."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel

from mbridge_fsdp_ckpt.errors import ConfigurationError, ManifestError

_log = logging.getLogger(__name__)


def schedule(scheduler: Any, saved: dict[str, Any], remedy: str) -> Callable[[], None]:
    """A schedule's state.

    It is tried on a copy whose param groups are copies: Megatron's scheduler compares its settings.

    Raises:
        ConfigurationError: They are not the saved ones.
    """
    trial = copy.copy(scheduler)
    trial.optimizer = SimpleNamespace(param_groups=[_copied(group) for group in scheduler.optimizer.param_groups])
    try:
        trial.load_state_dict(saved)
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            expected="the schedule that was saved",
            found=f"{type(error).__name__}: {error}",
            remedy=remedy,
            key="opt_param_scheduler",
        ) from error

    def restore() -> None:
        scheduler.num_steps = 0  # Megatron's `load_state_dict` adds the saved steps to those that were counted
        scheduler.load_state_dict(saved)

    return restore


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    """A learning rate in a tensor is filled where it is, so that too."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in group.items()}


def generators(loaded: Any, groups: Any, *, one_a_data_rank: bool, remedy: str) -> Callable[[], None]:
    """The random-number states that this rank is to get.

    A rank that finds its own coordinates in the checkpoint gets its own states.  Another data-parallel layout gives
    the states of the first rank at the same (pipeline, tensor) place, as Bridge does.  At another tensor- or
    pipeline-parallel size no saved state fits: generators stay as the run seeded them, and that is said.

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
    state = saved[groups.dp.rank()] if one_a_data_rank and groups.dp.rank() < len(saved) else saved[0]
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


def _say_that_none_fits() -> None:
    if dist.get_rank() == 0:
        _log.warning("no saved RNG state fits this layout: generators stay as seeded")


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
