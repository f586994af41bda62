# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Which golden checkpoints there are, and what their ranks do."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt import Settings
from testing.bridge import attention_layers
from testing.models import Recipe
from tests.core import cases, oracle

FOLDER = Path(__file__).parent
STEPS = 2

SMALL = Recipe(layers=1, hidden=8, ffn=8)
EXPERTS = SMALL.on(experts=2)

VALUES = {
    "iteration": STEPS,
    "name": "ä",
    "none": None,
    "loss": math.inf,
    "betas": (0.9, 0.95),
    "by_number": {1: "one"},
    "raw": b"\x00\xff",
    "tokens": torch.arange(3),
    "dtype": torch.bfloat16,
}
"""One of each kind that a value may be."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint of this format: on how many ranks, what, and how."""

    ranks: int
    recipe: Recipe
    with_optimizer: bool = True
    settings: Settings = field(default_factory=lambda: Settings(dcp_metadata="never"))


SAFE = {
    "weights_1_rank": Saved(1, SMALL, with_optimizer=False),
    "torch_adam_1_rank": Saved(1, SMALL),
    "fused_adam_2_ranks": Saved(2, SMALL.on(optimizer="auto"), settings=Settings(dcp_metadata="always")),
    "offload_tensor_2": Saved(2, SMALL.on(offload=1.0, tensor=2)),
    "fused_adam_expert_2": Saved(2, EXPERTS.on(optimizer="auto", expert=2)),
}

STOCK: dict[str, dict[str, Any]] = {
    "torch_adam_1_rank": {"ranks": 1, "optimizer": "torch"},
    "fused_adam_2_ranks": {"ranks": 2},
    "fused_adam_tensor_2": {"ranks": 2, "tensor": 2},
}
"""Runs of Bridge's `pretrain` in stock `fsdp_dtensor`."""


SMALL_RUN = {
    "tokenizer.vocab_size": 31,
    "model.vocab_size": 32,
    "model.num_layers": 1,
    "model.hidden_size": 8,
    "model.ffn_hidden_size": 8,
    "model.transformer_layer_spec": attention_layers,
}


def save(directory: str, saved: Saved) -> dict[str, Any]:
    """Train and save; what was live then, gathered by Megatron-FSDP itself."""
    trainable = cases.prepared(saved.recipe, steps=STEPS)
    mbridge_fsdp_ckpt.save(
        directory,
        model=trainable.model,
        optimizer=trainable.optimizer if saved.with_optimizer else None,
        values=VALUES,
        rank_values={"generator": torch.arange(4, dtype=torch.uint8)},
        settings=saved.settings,
    )
    live = oracle.live(trainable)
    return {key: found for key, found in live.items() if saved.with_optimizer or key.startswith("model.")}
