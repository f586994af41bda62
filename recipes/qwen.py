# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Recipes for Qwen's models.

A recipe is a function without arguments that makes a configuration of Megatron-Bridge.  It needs no network.
"""

from __future__ import annotations

from typing import Any

from recipes import published
from recipes.settings import Layout, finetuning, offload_optimizer, pretraining

_ISSUE_4910 = Layout(tensor=2, context=2, expert=8)


def qwen35_35b_a3b_pretrain() -> Any:
    """Qwen3.5-35B-A3B, as in issue 4910.

    Megatron-LM issue 4910: the whole optimizer is on the hosts.  The text model.
    """
    config = pretraining(published.QWEN35_35B_A3B.provider(), _ISSUE_4910)
    offload_optimizer(config)
    return config


def qwen35_35b_a3b_sft() -> Any:
    """Qwen3.5-35B-A3B, fine-tuning all weights.

    Laid out as for pre-training.
    """
    config = finetuning(published.QWEN35_35B_A3B.provider(), _ISSUE_4910)
    offload_optimizer(config)
    return config


def qwen35_397b_a17b_pretrain() -> Any:
    """Qwen3.5-397B-A17B, optimizer on the hosts."""
    config = pretraining(published.QWEN35_397B_A17B.provider(), Layout(tensor=2, context=2, expert=32))
    offload_optimizer(config)
    return config


def qwen3_30b_a3b_pretrain() -> Any:
    """Qwen3-30B-A3B."""
    return pretraining(published.QWEN3_30B_A3B.provider(), Layout(tensor=2, expert=8))


def qwen3_next_80b_a3b_pretrain() -> Any:
    """Qwen3-Next-80B-A3B, with an MTP layer."""
    model = published.QWEN3_NEXT_80B_A3B.provider()
    model.mtp_num_layers, model.mtp_loss_scaling_factor = 1, 0.1  # as Bridge's recipe; the published file is silent
    return pretraining(model, Layout(tensor=2, expert=16))


def qwen3_8b_pretrain() -> Any:
    """Qwen3-8B, dense."""
    return pretraining(published.QWEN3_8B.provider(), Layout(tensor=2))
