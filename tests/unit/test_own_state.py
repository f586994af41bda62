# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What modules keep beside tensors: which of them, under which keys, and what a load refuses to give them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mbridge_fsdp_ckpt.errors import ManifestError, UnsupportedStateError
from mbridge_fsdp_ckpt.format.names import FORMAT_NAME, STOCK_FORMAT
from mbridge_fsdp_ckpt.live import own_state
from mbridge_fsdp_ckpt.live.own_state import can_be_set, keepers, keys_of
from mbridge_fsdp_ckpt.live.readers.megatron_fsdp import naming_of
from mbridge_fsdp_ckpt.loading import own_state as loading
from mbridge_fsdp_ckpt.plan.boxes import whole
from mbridge_fsdp_ckpt.plan.keys import KeyEntry

KEY = "model.x._extra_state"


class Keeper(torch.nn.Module):
    """Keeps a number."""

    def get_extra_state(self) -> Any:
        """The number."""
        return 3

    def set_extra_state(self, state: Any) -> None:
        """Nobody looks."""


class OfMegatron(Keeper):
    """Keeps nothing, but for the sake of other classes' state dicts."""

    def get_extra_state(self) -> Any:
        """Nothing."""


OfMegatron.get_extra_state.__module__ = "megatron.core.tensor_parallel.layers"


class MoreThanMegatrons(OfMegatron):
    """Keeps something, although the class that it is made from does not."""

    def get_extra_state(self) -> Any:
        """Something."""
        return {"a": 1}


def tree(*paths: str) -> torch.nn.Module:
    """Modules that keep something at some paths."""
    root = torch.nn.Module()
    for path in paths:
        at = root
        for part in path.split("."):
            if part not in at._modules:
                at.add_module(part, Keeper() if path.endswith(f".{part}") else torch.nn.Module())
            at = at._modules[part]  # type: ignore[assignment]
    return root


def plan(name: str, key: str) -> Any:
    """As much of a plan as is looked at."""
    return SimpleNamespace(layout=SimpleNamespace(optimizer_name=f"module.{name}", key=key))


def reader_of(module: torch.nn.Module) -> Any:
    """As much of Megatron-FSDP's reader as is looked at."""
    return SimpleNamespace(module=module, naming=naming_of(module))


def test_modules_of_ones_own_may_keep_something() -> None:
    own, more = Keeper(), MoreThanMegatrons()
    assert keepers([torch.nn.Linear(2, 2), own, OfMegatron(), more, SimpleNamespace()]) == [own, more]
    assert can_be_set(own)
    assert not can_be_set(torch.nn.Linear(2, 2))


def test_keys_are_those_of_the_state_dict() -> None:
    module = tree(
        "module.module.decoder.keeper",
        "module.module.decoder._orig_mod._checkpoint_wrapped_module.wrapped",
        "module.module.fc1.to_wrap.inner",
        "module.module.fc1.adapter",
    )
    plans = [plan("module.module.fc1.to_wrap.weight", "module.fc1.weight"), plan("module.module.w", "module.w")]
    assert [key for key, _ in keys_of(reader_of(module), plans)] == [
        "module.decoder.keeper._extra_state",
        "module.decoder.wrapped._extra_state",
        "module.fc1.inner._extra_state",
        "module.fc1.adapter._extra_state",
    ]
    assert [key for key, _ in keys_of(reader_of(tree("a.b")), [])] == ["a.b._extra_state"]


def restored(data: bytes, *, part: Any = None, **entry: Any) -> Any:
    """What a load gives back of a key that has some bytes."""
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    described = KeyEntry(**{"dtype": "uint8", "shape": (len(data),), **entry})
    form = STOCK_FORMAT if entry.get("dtype") == "float32" else FORMAT_NAME
    chunk = SimpleNamespace(box=whole(described.shape))
    source: Any = SimpleNamespace(
        metadata=SimpleNamespace(directory=Path("c"), keys={KEY: described}, format=form),
        read=lambda chunk, verify: tensor.view(torch.float32) if form == STOCK_FORMAT else tensor,
    )
    state = loading.OwnState({KEY: part or Keeper()}, [])
    found: Any = state.restorations({KEY: [chunk]}, {KEY}, source, verify=True)  # type: ignore[list-item]
    return found[0].value


def test_values_come_back_whatever_follows_them() -> None:
    assert restored(b'{"a": {"$tuple": [1, null]}}   ') == {"a": (1, None)}
    assert torch.equal(restored(b"\0" * 8, dtype="float32", shape=(2,)), torch.zeros(2))  # of stock: a tensor


@pytest.mark.parametrize(
    ("data", "entry"),
    [
        (b"    ", {}),
        (b"{", {}),
        (b"\x80\x04K\x03.", {}),  # a pickle
        (b'{"a": 1, "a": 2}', {}),
        (b"NaN", {}),
        (b'{"$code": "os.system"}', {}),
        (b"[" * 400 + b"]" * 400, {}),
        (b"33", {"shape": (1, 2)}),
        (b"33", {"dtype": "int8"}),
        (b"33", {"shape": (3 * own_state.LARGEST,)}),
    ],
)
def test_bytes_that_are_no_value_are_refused(data: bytes, entry: dict[str, Any]) -> None:
    with pytest.raises(ManifestError):
        restored(data, **entry)


def test_a_module_that_takes_nothing_back_is_named() -> None:
    with pytest.raises(UnsupportedStateError, match=rf"{KEY}\] .* Linear without one"):
        restored(json.dumps(3).encode(), part=torch.nn.Linear(2, 2))
