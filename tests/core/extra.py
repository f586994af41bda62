# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of state that modules of one's own keep, and of buffers with odd names."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import torch

import mbridge_fsdp_ckpt
from testing.models import Recipe, Trainable
from tests.core import cases, failures, wrapped

RECIPE = Recipe(layers=1, experts=4)
SAVED, OTHER = 3, 8
"""What modules are made from: before a save, and before a load."""


class Keeper(torch.nn.Module):
    """Keeps what it was given as extra state; and buffers whose names are like its."""

    def __init__(self, kept: Any, first: float) -> None:
        super().__init__()
        self.kept, self.sets = kept, 0
        for number, name in enumerate(("last_extra_state", "_extra_state_of_mine", "_extra_states")):
            self.register_buffer(name, torch.arange(3) + first + number)
        self.register_buffer("not_saved_extra_state", torch.full((2,), first), persistent=False)
        inner = torch.nn.Module()
        inner.register_buffer("_extra_state", torch.full((2,), first))  # nobody overrides get_extra_state there
        inner.register_buffer("values", torch.full((3,), first))
        self.add_module("_extra_state_holder", inner)

    def get_extra_state(self) -> Any:
        """What it keeps."""
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        """Keep that."""
        self.kept, self.sets = state, self.sets + 1


class WithoutSetter(torch.nn.Module):
    """Would not take back what it keeps."""

    def get_extra_state(self) -> Any:
        """What it keeps."""
        return {"a": 1}


class Dumping(torch.nn.Module):
    """Puts a value that is no tensor into its state dict."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}count"] = 7


def kept_from(number: int) -> dict[str, Any]:
    """Values of many types, which depend on a number."""
    return {
        "steps": number * 10**6,
        "rate": number / 7,
        "beyond": float("inf"),
        "name": f"ä{number}",
        "raw": bytes([number, 0, 255]),
        "pair": (number, None),
        "by number": {1: [True, number], 2: torch.full((2, 3), number, dtype=torch.bfloat16)},
        "none of it": torch.zeros(0, 4),
    }


def tensor_from(number: int) -> torch.Tensor:
    """A tensor, likewise."""
    return torch.arange(4) + number


BUFFERS = {
    "last_extra_state": [3.0, 4.0, 5.0],
    "_extra_state_of_mine": [4.0, 5.0, 6.0],
    "_extra_states": [5.0, 6.0, 7.0],
    "_extra_state_holder._extra_state": [3.0, 3.0],
    "_extra_state_holder.values": [3.0, 3.0, 3.0],
    "not_saved_extra_state": [8.0, 8.0],
}
"""What a keeper that is made from `OTHER` has after a load of `SAVED`."""


def _nothings() -> list[Any]:
    return [None, torch.empty(0, dtype=torch.uint8), io.BytesIO()]


def with_keepers(number: int, *, experts: int = 1, wrap: bool = False) -> tuple[Trainable, dict[str, Keeper]]:
    """A model with keepers in it, made from a number; those of experts have their own, by their global number."""
    from megatron.core import parallel_state

    keepers: dict[str, Keeper] = {}

    def change(model: Any) -> None:
        decoder = next(module for name, module in model.named_modules() if name.endswith(".decoder"))
        mlp = decoder.layers[0].mlp
        keepers["decoder"] = decoder.mine = Keeper(kept_from(number), float(number))
        keepers["tensor"] = decoder.tensor = Keeper(tensor_from(number), 0.0)
        for place, nothing in enumerate(_nothings()):
            keepers[f"nothing {place}"] = Keeper(nothing, 0.0)
            decoder.add_module(f"nothing_{place}", keepers[f"nothing {place}"])
        first = parallel_state.get_expert_model_parallel_rank() * len(mlp.experts.local_experts)
        for local, expert in enumerate(mlp.experts.local_experts):
            name = f"expert {first + local}"
            keepers[name] = expert.mine = Keeper({"expert": first + local, "of": number}, float(number))
        if wrap:
            decoder.mine = wrapped.compiled(wrapped.checkpointed(decoder.mine))

    return cases.prepared(RECIPE.on(expert=experts), change=change), keepers


def save(directory: str, beside: bool) -> None:
    """A checkpoint of keepers at EP 2; one that goes on asynchronously has what was there at its call."""
    trainable, keepers = with_keepers(SAVED, experts=2)
    arguments = {"model": trainable.model, "optimizer": trainable.optimizer}
    if not beside:
        mbridge_fsdp_ckpt.save(directory, **arguments)
        return
    late = keepers["nothing 0"]
    mbridge_fsdp_ckpt.save(f"{directory}.first", **arguments)
    late.kept = {"came": "later"}
    saving = mbridge_fsdp_ckpt.async_save(directory, **arguments)
    late.kept, keepers["decoder"].kept["steps"] = None, -1
    saving.wait()


def load(directory: str, experts: int) -> dict[str, Any]:
    """What keepers, and their buffers, hold after a load into others."""
    trainable, keepers = with_keepers(OTHER, experts=experts, wrap=True)
    mbridge_fsdp_ckpt.load(directory, model=trainable.model, optimizer=trainable.optimizer)
    found: dict[str, Any] = {name: plain((keeper.kept, keeper.sets)) for name, keeper in keepers.items()}
    own = keepers["decoder"]
    return found | {f"buffer {name}": buffer.tolist() for name, buffer in own.named_buffers()}


def plain(value: Any) -> Any:
    """A value with what it is made of, to be compared and sent: tensors, and types, as they are."""
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), value.tolist(), tuple(value.shape)
    if isinstance(value, io.BytesIO):
        return "stream", value.getvalue()
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    return type(value).__name__, value


def _with(module: torch.nn.Module) -> Trainable:
    def change(model: Any) -> None:
        next(part for name, part in model.named_modules() if name.endswith(".decoder")).mine = module

    return cases.prepared(failures.SMALL, change=change)


REFUSED: dict[str, tuple[Any, str]] = {
    "an object": (lambda: Keeper({"a": object()}, 0.0), "object"),
    "a set": (lambda: Keeper({1, 2}, 0.0), "set"),
    "a large tensor": (lambda: Keeper({"a": torch.zeros(1 << 19)}, 0.0), "2097152 bytes"),
    "no setter": (WithoutSetter, "WithoutSetter without one"),
    "a value": (Dumping, "int"),
}


def save_refused(directory: str) -> dict[str, dict[str, Any]]:
    """The errors of saves of what cannot be saved."""
    found = {}
    for name, (make, _) in REFUSED.items():
        trainable = _with(make())
        found[name] = failures.seen(trainable, partial(mbridge_fsdp_ckpt.save, directory, model=trainable.model))
    return found


def load_otherwise(directory: str) -> dict[str, dict[str, Any]]:
    """Loads where only the checkpoint, or only the model, keeps something: the errors, and what was allowed."""
    plain_model, keeper = cases.prepared(failures.SMALL), Keeper({"a": 1}, 0.0)
    keeping = _with(keeper)
    mbridge_fsdp_ckpt.save(f"{directory}.without", model=plain_model.model)
    mbridge_fsdp_ckpt.save(f"{directory}.with", model=keeping.model)

    def attempt(trainable: Trainable, what: str, **settings: Any) -> Any:
        chosen = mbridge_fsdp_ckpt.Settings(**settings)
        return lambda: mbridge_fsdp_ckpt.load(f"{directory}.{what}", model=trainable.model, settings=chosen)

    buffers = [f"model.*.mine.{name}" for name in BUFFERS]
    found = {
        "missing": failures.seen(keeping, attempt(keeping, "without", allow_missing=buffers)),
        "unexpected": failures.seen(plain_model, attempt(plain_model, "with", allow_unexpected=buffers)),
    }
    keeper.kept, keeper.sets = {"live": 2}, 0
    skipped = attempt(keeping, "without", allow_missing=["model.*.mine.*"])().skipped
    found["allowed"] = {"kept": keeper.kept, "sets": keeper.sets, "skipped": skipped}
    attempt(plain_model, "with", allow_unexpected=["model.*.mine.*"])()
    keeper.kept = None
    attempt(keeping, "with")()
    found["again"] = {"kept": keeper.kept, "sets": keeper.sets}
    return found
