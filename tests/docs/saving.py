# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks save for the reader of the pages."""

from __future__ import annotations

import mbridge_fsdp_ckpt
from testing.models import Recipe
from tests.core import cases


def save(directory: str, iteration: int, layers: int) -> None:
    """A model after one step, as of an iteration."""
    trainable = cases.prepared(Recipe(layers=layers), steps=1)
    values = {"iteration": iteration}
    mbridge_fsdp_ckpt.save(directory, model=trainable.model, optimizer=trainable.optimizer, values=values)
