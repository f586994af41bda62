# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of memory that several keys fill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import mbridge_fsdp_ckpt
from testing.models import Trainable
from tests.core import cases, failures, oracle

Buffers = Callable[[float], dict[str, torch.Tensor]]
RECIPE = failures.SMALL.on(tensor=2)


def tie(model: Any) -> None:
    """Let the output layer have the embedding's weight, as users tie modules."""
    inner = model.module
    inner.output_layer.weight = inner.embedding.word_embeddings.weight


def _apart(first: float) -> dict[str, torch.Tensor]:
    return {"one": torch.arange(first, first + 12), "other": torch.arange(first, first + 12).flip(0)[:8].view(2, 4)}


def _overlapping(first: float) -> dict[str, torch.Tensor]:
    base = torch.arange(first, first + 14)
    return {"one": base[:12], "other": base[6:].view(2, 4)}


def _of_one_memory(first: float) -> dict[str, torch.Tensor]:
    """Two storages over the same memory, one of them of another dtype."""
    base = torch.arange(first, first + 12)
    return {"one": base, "other": torch.from_numpy(base.numpy()).view(torch.int32)[2:10].view(2, 4)}


def _interleaved(first: float) -> dict[str, torch.Tensor]:
    base = torch.arange(first, first + 24)
    return {"one": base[::2], "other": base[1:17:2].view(2, 4)}


BUFFERS: dict[str, Buffers] = {
    "apart": _apart,
    "overlapping": _overlapping,
    "of one memory": _of_one_memory,
    "interleaved": _interleaved,
}


def _with_buffers(kind: str, first: float) -> tuple[Trainable, dict[str, torch.Tensor]]:
    trainable, buffers = cases.prepared(failures.SMALL), BUFFERS[kind](first)
    decoder = next(module for name, module in trainable.model.named_modules() if name.endswith(".decoder"))
    for name, buffer in buffers.items():
        decoder.register_buffer(name, buffer)
    return trainable, buffers


def save_weights(directory: str, change: Callable[[Any], None] | None) -> dict[str, Any]:
    """A checkpoint of weights alone; what was live."""
    trainable = cases.prepared(RECIPE, change=change)
    mbridge_fsdp_ckpt.save(directory, model=trainable.model)
    return oracle.live(trainable)


def load_weights(directory: str, change: Callable[[Any], None], leave_out: str = "") -> dict[str, Any]:
    """What a load of weights alone did: an error, or what is live."""
    trainable = cases.prepared(RECIPE, seed=999, change=change)

    def load() -> None:
        include = (lambda key: leave_out not in key) if leave_out else None
        mbridge_fsdp_ckpt.load(directory, model=trainable.model, include=include)

    if leave_out:
        load()
        return oracle.live(trainable)
    return failures.seen(trainable, load)


def train_and_save(directory: str) -> dict[str, Any]:
    """Two steps of tied modules, and a save with the optimizer; what was live."""
    trainable = cases.prepared(RECIPE, steps=2, change=tie)
    mbridge_fsdp_ckpt.save(directory, model=trainable.model, optimizer=trainable.optimizer)
    return oracle.live(trainable)


def load_and_save(directory: str, again: str) -> dict[str, Any]:
    """What is live after a load into tied modules that were initialised otherwise; they are saved again."""
    trainable = cases.prepared(RECIPE, seed=999, change=tie)
    mbridge_fsdp_ckpt.load(directory, model=trainable.model, optimizer=trainable.optimizer)
    mbridge_fsdp_ckpt.save(again, model=trainable.model, optimizer=trainable.optimizer)
    return oracle.live(trainable)


def save_buffers(root: str) -> None:
    """A checkpoint of each kind of buffers."""
    for kind in BUFFERS:
        trainable, _ = _with_buffers(kind, 100.0)
        mbridge_fsdp_ckpt.save(f"{root}/{kind}", model=trainable.model)


def load_own_buffers(root: str) -> dict[str, bool]:
    """Whether each model gets back the buffers that it saved itself."""
    found = {}
    for kind, make in BUFFERS.items():
        trainable, buffers = _with_buffers(kind, 500.0)
        mbridge_fsdp_ckpt.load(f"{root}/{kind}", model=trainable.model)
        found[kind] = all(torch.equal(buffers[name], saved) for name, saved in make(100.0).items())
    return found


def load_other_buffers(root: str, saved: str, kind: str) -> dict[str, Any]:
    """The error of a load of buffers that lay apart into memory that they share."""
    trainable, buffers = _with_buffers(kind, 500.0)
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    seen = failures.seen(trainable, lambda: mbridge_fsdp_ckpt.load(f"{root}/{saved}", model=trainable.model))
    same = all(torch.equal(buffers[name], old) for name, old in before.items())
    return {**seen, "unchanged": seen["unchanged"] and same}
