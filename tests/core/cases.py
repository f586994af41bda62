# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the core tests; each function runs on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.format.columns import PREAMBLE
from mbridge_fsdp_ckpt.io.ranges import Bytes, OpenFiles
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.live.readers.megatron_fsdp import find_fsdp_module
from mbridge_fsdp_ckpt.live.tensors import local_shard
from mbridge_fsdp_ckpt.plan import records
from mbridge_fsdp_ckpt.upstream_fixes import corrections
from testing.collectives import count_collectives
from testing.kernels import replace_cuda_only_kernels
from testing.models import Recipe, Trainable, build
from tests.core import oracle


def prepared(recipe: Recipe, steps: int = 0, seed: int = 123, change: Callable[[Any], None] | None = None) -> Trainable:
    """A model after some steps, of a Megatron-Core that is corrected as plug-ins do; see `build` for `change`."""
    replace_cuda_only_kernels()
    corrections.apply(__name__)
    trainable = build(recipe, seed, change)
    for number in range(steps):
        trainable.step(number)
    return trainable


def train_and_save(directory: str, recipe: Recipe, more_steps: int = 0) -> dict[str, Any]:
    """Two steps, a save, then more steps: losses, what was live at the save, and at the end."""
    trainable = prepared(recipe, steps=2)
    with count_collectives() as collectives:
        mbridge_fsdp_ckpt.save(directory, model=trainable.model, optimizer=trainable.optimizer, values={"iteration": 2})
    counted = dict(collectives.collectives)
    saved = oracle.live(trainable)
    losses = [trainable.step(number) for number in range(2, 2 + more_steps)]
    return {"live": saved, "collectives": counted, "losses": losses, "end": oracle.live(trainable)}


def slices(model: Any) -> dict[str, Any]:
    """What of each parameter this rank has, as Megatron-FSDP says it."""
    named = dict(find_fsdp_module(model).param_and_grad_buffer.optimizer_named_parameters)
    return {name: getattr(each, "megatron_fsdp_slice", None) for name, each in named.items()}


def save_with_whole_experts(directory: str, recipe: Recipe) -> list[str]:
    """The same first steps and save, with experts marked as `no_shard` leaves parameters, and nothing else.

    As with `data_parallel_sharding_strategy_experts`.  Each is whole here where experts have no data parallelism.
    """
    trainable = prepared(recipe, steps=2)
    named = dict(find_fsdp_module(trainable.model).param_and_grad_buffer.optimizer_named_parameters)
    experts = [name for name in named if ".local_experts." in name]
    for name in experts:
        del named[name].megatron_fsdp_slice
    mbridge_fsdp_ckpt.save(directory, model=trainable.model, optimizer=trainable.optimizer, values={"iteration": 2})
    return experts


def load_and_save_cut_otherwise(directory: str, again: str, recipe: Recipe) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load where Megatron-FSDP cuts groups of parameters at other rows, and save; what each rank has by both rules."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer

    before = slices(prepared(recipe).model)
    names = vars(math) | {"lcm": lambda *sizes: 3 * math.lcm(*sizes)}
    with patch.object(param_and_grad_buffer, "math", SimpleNamespace(**names)):
        trainable = prepared(recipe, seed=999)
    mbridge_fsdp_ckpt.load(directory, model=trainable.model, optimizer=trainable.optimizer)
    mbridge_fsdp_ckpt.save(again, model=trainable.model, optimizer=trainable.optimizer, values={"iteration": 2})
    return before, slices(trainable.model)


def with_small_records[**P, R](largest: int, case: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """A case in which larger blocks than so many bytes are cut into records, as those of large models are.

    Of a record, a quarter of these bytes are hashed at a time.
    """
    with patch.object(records, "LARGEST_RECORD", largest), patch.object(records, "HASHED_BLOCK", largest // 4):
        return case(*args, **kwargs)


def load_and_save(directory: str, again: str, recipe: Recipe, more_steps: int = 0) -> dict[str, Any]:
    """Load into a model initialised otherwise, save again, then more steps."""
    trainable = prepared(recipe, seed=999)
    loaded = mbridge_fsdp_ckpt.load(directory, model=trainable.model, optimizer=trainable.optimizer)
    assert loaded.values["iteration"] == 2
    found = oracle.live(trainable)
    if again:
        mbridge_fsdp_ckpt.save(again, model=trainable.model, optimizer=trainable.optimizer, values=dict(loaded.values))
    losses = [trainable.step(number) for number in range(2, 2 + more_steps)]
    return {"live": found, "losses": losses, "end": oracle.live(trainable)}


def load_counting(directory: str, recipe: Recipe) -> dict[str, Any]:
    """Load: groups' index files whose prefixes, or rows, this rank read."""
    trainable, plain = prepared(recipe, seed=999), OpenFiles.read
    prefixes: list[str] = []
    rows: list[str] = []

    def read(self: OpenFiles, path: AnyPath, offset: int, length: int, *further: Any) -> Bytes:
        if path.name.startswith("group_") and length > PREAMBLE.size:
            (rows if offset else prefixes).append(path.name)
        return plain(self, path, offset, length, *further)

    with patch.object(OpenFiles, "read", read):
        mbridge_fsdp_ckpt.load(directory, model=trainable.model, optimizer=trainable.optimizer)
    return {"live": oracle.live(trainable), "prefixes": prefixes, "rows": rows}


def names_in(directory: str | Path) -> list[str]:
    """Names in a directory, sorted."""
    return sorted(path.name for path in Path(directory).iterdir())


def weights_after(recipe: Recipe, steps: int) -> dict[str, Any]:
    """This rank's main weights after some steps, as NumPy arrays, and the losses on the way."""
    trainable = prepared(recipe)
    losses = [trainable.step(number) for number in range(steps)]
    state = trainable.model.module.state_dict(keep_vars=True)
    weights = {key: local_shard(p).cpu().numpy() for key, p in state.items() if isinstance(p, torch.nn.Parameter)}
    return {"weights": weights, "losses": losses}
