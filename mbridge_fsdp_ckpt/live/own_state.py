# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""State that modules keep beside parameters and buffers: what `get_extra_state` of a module of one's own returns.

It is whatever the module likes, and the same on all ranks that have the module, like a buffer.  On disk it is a tensor
of bytes under its name in the state dict, `_extra_state` last; `saving.own_state` and `loading.own_state` say what the
bytes are.

Transformer Engine's modules have FP8 state there, as a pickle: `live.fp8` takes it from where it is made.  Megatron's
return nothing, so that their state dicts are like those.  Neither is asked here.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch

from mbridge_fsdp_ckpt.families.wrapping import unwrapped
from mbridge_fsdp_ckpt.live.readers.protocol import EXTRA_STATE, Reader
from mbridge_fsdp_ckpt.plan.layout import ParameterLayout
from mbridge_fsdp_ckpt.plan.slices import ParameterPlan, plan_parameter

LARGEST = 1 << 26
"""Bytes on disk of what one module keeps."""

_NONE_OF_ITS_OWN = "megatron", "transformer_engine"


def keepers(parts: Iterable[Any]) -> list[Any]:
    """The modules that may keep such state."""
    parts = list(parts)
    kinds = {kind for kind in set(map(type, parts)) if _keeps(kind)}
    return [part for part in parts if type(part) in kinds] if kinds else []


def _keeps(kind: type) -> bool:
    method = getattr(kind, "get_extra_state", None)
    if method is None or method is torch.nn.Module.get_extra_state:
        return False
    return str(getattr(method, "__module__", "")).partition(".")[0] not in _NONE_OF_ITS_OWN


def can_be_set(part: Any) -> bool:
    """Whether a module takes back what it keeps."""
    return getattr(type(part), "set_extra_state", None) is not torch.nn.Module.set_extra_state


def is_nothing(value: Any) -> bool:
    """Whether a module keeps nothing now: it returned None, or a tensor or a stream without bytes."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 0
    return value is None or (isinstance(value, io.BytesIO) and value.getbuffer().nbytes == 0)


def keys_of(reader: Reader, plans: Iterable[ParameterPlan]) -> list[tuple[str, Any]]:
    """Every module that may keep such state, each once, with the key of it.

    Args:
        reader: The reader of the model.
        plans: The plans of the model's parameters.
    """
    naming, root = reader.naming, _root(plans)
    modules = reader.module.named_modules()
    named = [(_as_in_state_dict(name, root), part) for name, part in modules if _keeps(type(part))]
    return [(naming.on_disk(f"{name}.{EXTRA_STATE}".lstrip("."), root), part) for name, part in named]


def _root(plans: Iterable[ParameterPlan]) -> str:
    """The module from which keys start: what the optimizer's name of a parameter has in front of its key."""
    for plan in plans:
        name, below = plan.layout.optimizer_name.removeprefix("module."), f".{plan.layout.key}"
        if name.endswith(below):
            return name.removesuffix(below)
    return ""


def _as_in_state_dict(name: str, root: str) -> str:
    """A module's name from the root on, without wrappers, those of adapters among them."""
    path = [part for part in unwrapped(name).split(".") if part != "to_wrap"]
    above = root.split(".") if root else []
    return ".".join(path[len(above) :] if path[: len(above)] == above else path)


def plan_of(key: str, shape: Sequence[int], reader: Reader) -> ParameterPlan:
    """The plan of a tensor that every rank with a certain module holds whole.  Plans are cached by layout.

    Args:
        key: The tensor's key.
        shape: The tensor's shape.
        reader: The reader of the model.
    """
    return _plan(reader.whole(key, tuple(shape)))


@lru_cache(maxsize=1 << 12)
def _plan(layout: ParameterLayout) -> ParameterPlan:
    return plan_parameter(layout, None)
