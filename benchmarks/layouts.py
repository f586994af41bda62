# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A checkpoint that was saved in another layout, for loads that have to reshard.

It is made before anything is measured, in processes that end: no second model takes memory meanwhile.  That a load of
it brings every bit is checked by torch's own reader: it finds the same in what the loaded model saves.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import mbridge_fsdp_ckpt
from benchmarks.cases import leave
from benchmarks.large import untrained
from testing.gpu.state import clear
from testing.models import Recipe, Trainable
from testing.ranks import RankPool

LAYOUT: dict[str, Any] = {"tensor": 2}
"""The other one: each rank holds a part of every matrix, where data parallelism gives it some matrices as a whole."""


def save_elsewhere(pool: RankPool, folder: str, recipe: Recipe) -> None:
    """Leave the checkpoint in `elsewhere(folder)`."""
    pool.run(_save, folder, recipe.on(**LAYOUT))
    pool.run(leave, may_die=range(pool.size))  # so that the model's memory is free again


def elsewhere(folder: str | Path) -> Path:
    """Where the checkpoint of the other layout is."""
    return Path(folder) / "elsewhere"


def check(folder: str | Path, trainable: Trainable) -> None:
    """Load it into a model that is set to zero before, and save that in its own layout.

    Raises:
        RuntimeError: The checkpoint is of the same layout, or bits differ.
    """
    whole = {"model": trainable.model, "optimizer": trainable.optimizer}
    again = Path(folder) / "again"
    clear(trainable)
    loaded = mbridge_fsdp_ckpt.load(elsewhere(folder), **whole)
    if loaded.topology["tensor"] == trainable.recipe.tensor:
        raise RuntimeError(f"{elsewhere(folder)} was saved in the layout that it is loaded in: {loaded.topology}")
    mbridge_fsdp_ckpt.save(again, **whole)
    if dist.get_rank() == 0:
        require_same(_digests(again), _digests(elsewhere(folder)))
        shutil.rmtree(again)
    dist.barrier()


def require_same(found: Mapping[str, str], saved: Mapping[str, str]) -> None:
    """Compare digests by key.

    Raises:
        RuntimeError: Some differ, or there are none.
    """
    wrong = [key for key in saved.keys() | found.keys() if saved.get(key) != found.get(key)]
    if wrong or not saved:
        raise RuntimeError(f"{len(wrong)} of {len(saved)} tensors are not what was saved: {sorted(wrong)[:5]}")


def digest(tensor: torch.Tensor) -> str:
    """A hash of its elements."""
    return xxhash.xxh3_128_hexdigest(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def _save(folder: str, recipe: Recipe) -> None:
    trainable = untrained(recipe)
    trainable.step(0)
    mbridge_fsdp_ckpt.save(elsewhere(folder), model=trainable.model, optimizer=trainable.optimizer)


def _digests(checkpoint: Path) -> dict[str, str]:
    """A hash of each tensor, read by torch's own reader."""
    reader = FileSystemReader(checkpoint)
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this rank reads alone
        dcp.load(state, storage_reader=reader, no_dist=True)
    return {key: digest(tensor) for key, tensor in state.items()}
