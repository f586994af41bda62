# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What modules keep beside tensors (`live.own_state`), as bytes: a typed value in JSON, then spaces."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch

from mbridge_fsdp_ckpt.errors import UnsupportedStateError
from mbridge_fsdp_ckpt.format.values import encode
from mbridge_fsdp_ckpt.live.own_state import LARGEST, can_be_set, is_nothing, keepers, keys_of, plan_of
from mbridge_fsdp_ckpt.live.planned import Planned
from mbridge_fsdp_ckpt.live.readers.protocol import Reader
from mbridge_fsdp_ckpt.plan.keys import MODEL_PREFIX
from mbridge_fsdp_ckpt.plan.slices import ParameterPlan
from mbridge_fsdp_ckpt.remedies import remedy

_ROUNDED = 1 << 12
"""Bytes: a plan stands as long as a tensor has its shape, and a counter has another digit now and then."""


def own_state(reader: Reader, parts: Iterable[Any], plans: Iterable[ParameterPlan]) -> list[Planned]:
    """What modules keep now, each with its plan.

    Args:
        reader: The reader of the model.
        parts: The modules below it that may keep state.
        plans: The plans of the model's parameters.

    Raises:
        UnsupportedStateError: What one keeps is no data, or too much, or could not be given back to it.
    """
    if not keepers(parts):
        return []
    found = []
    for key, part in keys_of(reader, plans):
        value = part.get_extra_state()
        if not is_nothing(value):
            tensor = _bytes_of(value, part, key)
            found.append(Planned(plan_of(key, tensor.shape, reader), tensor, is_buffer=False))
    return found


def _bytes_of(value: Any, part: Any, key: str) -> torch.Tensor:
    if not can_be_set(part):
        raise _unsupported("a module with set_extra_state, too", f"{type(part).__name__} without one", key)
    try:
        text = json.dumps(encode(value, f"{MODEL_PREFIX}{key}"), separators=(",", ":")).encode()
    except UnsupportedStateError as error:
        raise _unsupported(error.expected, error.found, error.key or key) from error
    if len(text) > LARGEST:
        raise _unsupported(f"up to {LARGEST} bytes", str(len(text)), key)
    return torch.frombuffer(bytearray(text.ljust(-(-len(text) // _ROUNDED) * _ROUNDED)), dtype=torch.uint8)


def _unsupported(expected: str, found: str, key: str) -> UnsupportedStateError:
    return UnsupportedStateError(
        expected=f"extra state that can be saved and loaded: {expected}",
        found=found,
        remedy=remedy(
            "Let get_extra_state return plain data and small tensors; keep large ones as persistent buffers.",
            "Or leave it out with {include}.",
            "Nothing was written.",
        ),
        key=key,
    )
