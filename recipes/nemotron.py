# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Recipes for NVIDIA's Nemotron models; see `qwen` for what a recipe is."""

from __future__ import annotations

from typing import Any

from recipes import published
from recipes.settings import Layout, pretraining


def nemotron_3_nano_pretrain() -> Any:
    """Nemotron-3-Nano-30B-A3B, Mamba hybrid."""
    model = published.NEMOTRON_3_NANO.provider()
    model.moe_shared_expert_overlap = False  # as Bridge's recipe
    return pretraining(model, Layout(tensor=2, expert=8))
