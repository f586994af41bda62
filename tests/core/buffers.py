# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of buffers: views of all kinds, as models register them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.errors import CheckpointError
from testing.models import Trainable
from tests.core import cases, failures

Views = dict[str, Callable[[torch.Tensor], torch.Tensor]]

STRIDED: Views = {
    "plain": lambda base: base,
    "transposed": lambda base: base.t(),
    "every other column": lambda base: base[:, ::2],
    "some rows": lambda base: base[1:3],
    "one column": lambda base: base[:, 1],
    "permuted": lambda base: base.view(4, 2, 3).permute(2, 0, 1),
    "channels last": lambda base: base.view(1, 4, 2, 3).contiguous(memory_format=torch.channels_last),
    "scalar of a matrix": lambda base: base[1, 2],
    "one of every seventh column": lambda base: base[1, 2::7],
}
OVERLAPPING: Views = {
    "expanded": lambda base: base[:1].expand(5, 6),
    "windows": lambda base: base.view(-1).unfold(0, 4, 2),
}


class Derived(torch.nn.Module):
    """A layer that puts into its state dict what it made for it, not what it holds."""

    def __init__(self, base: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("held", base)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}held"] = self.get_buffer("held") * 2


def with_buffers(views: Views, first: int) -> tuple[Trainable, dict[str, torch.Tensor]]:
    """A model with one buffer a view, each over 24 numbers of its own that count from `first`."""
    trainable = cases.prepared(failures.SMALL)
    buffers = {}
    for number, (name, view) in enumerate(views.items()):
        base = torch.arange(first + 100 * number, first + 100 * number + 24, dtype=torch.float32).view(4, 6)
        buffers[name] = view(base)
        _decoder(trainable).register_buffer(name.replace(" ", "_"), buffers[name])
    return trainable, buffers


def _decoder(trainable: Trainable) -> Any:
    return next(module for name, module in trainable.model.named_modules() if name.endswith(".decoder"))


def save(directory: str, *names: str) -> None:
    """A checkpoint of a model with such buffers."""
    trainable, _ = with_buffers({name: (STRIDED | OVERLAPPING)[name] for name in names}, 0)
    mbridge_fsdp_ckpt.save(directory, model=trainable.model, optimizer=trainable.optimizer)


def load(directory: str) -> dict[str, bool]:
    """Whether each strided buffer got the values that were saved, when it held others before."""
    expected = {name: buffer.clone() for name, buffer in with_buffers(STRIDED, 0)[1].items()}
    trainable, buffers = with_buffers(STRIDED, 7_000)
    assert not any(torch.equal(buffers[name], expected[name]) for name in expected)
    mbridge_fsdp_ckpt.load(directory, model=trainable.model, optimizer=trainable.optimizer)
    return {name: torch.equal(buffers[name], expected[name]) for name in expected}


def load_overlapping(directory: str, name: str) -> dict[str, Any]:
    """The error of a load into memory whose elements lie on each other, and whether anything changed."""
    trainable, buffers = with_buffers({name: OVERLAPPING[name]}, 7_000)
    return _refused(directory, trainable, buffers[name])


def save_derived(directory: str) -> None:
    """A checkpoint of a model whose layer derives what it saves."""
    trainable = cases.prepared(failures.SMALL)
    _decoder(trainable).add_module("derived", Derived(torch.ones(3)))
    mbridge_fsdp_ckpt.save(directory, model=trainable.model, optimizer=trainable.optimizer)


def load_derived(directory: str) -> dict[str, Any]:
    """The error of a load into a tensor that only the state dict has, and whether anything changed."""
    trainable = cases.prepared(failures.SMALL)
    held = torch.full((3,), 5.0)
    _decoder(trainable).add_module("derived", Derived(held))
    return _refused(directory, trainable, held)


def save_sparse(directory: str) -> list[dict[str, Any]]:
    """The error of a save of a sparse buffer; one that is not persistent, or left out, is in nobody's way."""
    trainable = cases.prepared(failures.SMALL)
    decoder = _decoder(trainable)
    decoder.register_buffer("left_out", torch.eye(3).to_sparse(), persistent=False)
    decoder.register_buffer("sparse", torch.eye(3).to_sparse())
    seen = failures.seen(trainable, lambda: mbridge_fsdp_ckpt.save(directory, model=trainable.model))
    for action in (mbridge_fsdp_ckpt.save, mbridge_fsdp_ckpt.load):
        action(f"{directory}.rest", model=trainable.model, include=lambda key: not key.endswith("sparse"))
    del decoder.sparse
    decoder.register_buffer("sparse", torch.eye(3))
    mbridge_fsdp_ckpt.save(f"{directory}.dense", model=trainable.model)
    decoder.sparse = torch.eye(3).to_sparse()
    load = failures.seen(trainable, lambda: mbridge_fsdp_ckpt.load(f"{directory}.dense", model=trainable.model))
    return [seen, load]


def save_strangers(directory: str) -> list[dict[str, Any]]:
    """The errors of saves after a parameter was added to a wrapped model, and after one was replaced."""
    found = []
    for steps in (0, 1):  # Megatron-FSDP has its own parameters in the model, or those that compute
        trainable = cases.prepared(failures.SMALL, steps=steps)
        mbridge_fsdp_ckpt.save(f"{directory}.before", model=trainable.model)
        layer = _decoder(trainable).layers[0]
        weight = layer.mlp.linear_fc2.weight
        for owner, name in ((layer, "added"), (layer.mlp.linear_fc2, "weight")):
            owner.register_parameter(name, torch.nn.Parameter(torch.zeros(4, 5)))
            try:
                mbridge_fsdp_ckpt.save(directory, model=trainable.model, optimizer=trainable.optimizer)
            except CheckpointError as error:
                found.append({"error": type(error).__name__, "text": str(error), "unchanged": True})
            layer._parameters.pop("added", None)
        layer.mlp.linear_fc2.weight = weight
    return found


def _refused(directory: str, trainable: Trainable, buffer: torch.Tensor) -> dict[str, Any]:
    before = buffer.clone()
    seen = failures.seen(
        trainable,
        lambda: mbridge_fsdp_ckpt.load(directory, model=trainable.model, optimizer=trainable.optimizer),
    )
    return {**seen, "unchanged": seen["unchanged"] and torch.equal(buffer, before)}
