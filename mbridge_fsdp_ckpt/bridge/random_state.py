"""Random-number states: saved a rank, restored to the rank that has the same place, or one like it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from megatron.bridge.utils.common_utils import print_rank_0
from megatron.core import tensor_parallel

from mbridge_fsdp_ckpt.errors import ManifestError


def restoration(loaded: Any, cfg: Any, pg_collection: Any) -> Callable[[], None]:
    """Check the states that this rank is to get; the result sets its generators.

    A rank that finds its own coordinates in the checkpoint gets its own states.  Another data-parallel layout gives
    the states of the first rank at the same (pipeline, tensor) place, as Bridge does.  At another tensor- or
    pipeline-parallel size no saved state fits: generators stay as the run seeded them, and that is said.

    Raises:
        ManifestError: The states are not what Bridge saves, or belong to other generators.
    """
    saved = _states_at_place(loaded, pg_collection)
    if saved is None:
        return lambda: print_rank_0("WARNING: no saved RNG state fits this layout: generators stay as seeded")
    state = saved[pg_collection.dp.rank()] if _one_a_data_rank(cfg, saved, pg_collection) else saved[0]
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
            expected="RNG states as Bridge saves them",
            found=f"{type(error).__name__}: {error}",
            remedy="Load with checkpoint.load_rng=False.",
        ) from error

    def restore() -> None:
        random.setstate(state["random_rng_state"])
        np.random.set_state(state["np_rng_state"])
        torch.set_rng_state(state["torch_rng_state"])
        torch.cuda.set_rng_state(state["cuda_rng_state"])
        tracker.set_states(tracked)

    return restore


def _check_like(saved: torch.Tensor, live: torch.Tensor) -> None:
    if saved.dtype != live.dtype or saved.shape != live.shape:
        raise ValueError(f"a generator state of {saved.dtype} {list(saved.shape)}, not {live.dtype} {list(live.shape)}")


def _states_at_place(loaded: Any, pg_collection: Any) -> list[Any] | None:
    place = f"({pg_collection.pp.rank()}, {pg_collection.tp.rank()})"
    sizes = (("tensor", pg_collection.tp.size()), ("pipeline", pg_collection.pp.size()))
    if any(loaded.topology.get(name, size) != size for name, size in sizes):
        return None
    records = ([loaded.own] if loaded.own is not None else []) + list(loaded.records)
    for record in records:
        states = (record.values or {}).get("rng_state", {}).get(place)
        if states:
            return list(states)
    return None


def _one_a_data_rank(cfg: Any, saved: list[Any], pg_collection: Any) -> bool:
    return bool(cfg.rng.data_parallel_random_init) and pg_collection.dp.rank() < len(saved)
