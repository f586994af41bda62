# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Real `pretrain()` runs of a small Qwen3.5-shaped model, as cases for ranks that live on."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import mbridge_fsdp_ckpt
from testing import bridge
from testing.collectives import count_collectives
from testing.kernels import replace_cuda_only_kernels
from testing.models import Recipe, Trainable, torch_adam
from testing.ranks import no_process_group
from tests.applied import applied_numbers
from tests.core import oracle
from tests.mock_data import fewer_documents


@dataclass(frozen=True)
class Run:
    """One call of `pretrain()`.

    Args:
        directory: Checkpoints, to load from and to save to.
        iterations: Last iteration.
        optimizer: "fused" (Transformer Engine) or "torch".
        adapters: Whether Bridge's LoRA is trained, over `checkpoint.pretrained_checkpoint`.
        config: More settings, by dotted name in Bridge's config.
    """

    directory: str
    iterations: int = 4
    save_every: int = 2
    format: str = "fsdp_dtensor_safe"
    takeover: bool = False
    optimizer: str = "fused"
    offload: float = 0.0
    tensor: int = 1
    expert: int = 1
    experts: int = 4
    adapters: bool = False
    config: dict[str, Any] = field(default_factory=dict)

    def on(self, **changes: Any) -> Run:
        """The same run, changed."""
        return replace(self, **changes)

    @property
    def recipe(self) -> Recipe:
        """Its model."""
        return Recipe(
            layers=3,
            ffn=64,
            experts=self.experts,
            gated_delta_net=True,
            vocabulary=128,
            tensor=self.tensor,
            expert=self.expert,
            offload=self.offload or None,
        )


@no_process_group
def train(run: Run, callbacks: Any = None) -> dict[str, Any]:
    """Train; what was seen.

    Returns:
        losses as full floats by iteration, digests of all tensors after the load and at the end, collectives of each
        save, what the optimizer's kernels were handed in each iteration, and progress after the load.
    """
    from megatron.bridge.training import pretrain as bridge_pretrain
    from megatron.bridge.training.gpt_step import forward_step

    replace_cuda_only_kernels()
    fewer_documents()
    if run.format == "fsdp_dtensor_safe" or run.takeover:
        mbridge_fsdp_ckpt.register(takeover=run.takeover)
    else:
        mbridge_fsdp_ckpt.unregister()
    os.environ["MASTER_ADDR"] = os.environ.get("MASTER_ADDR", "127.0.0.1")
    seen = _Observer(run)
    adam = torch_adam() if run.optimizer == "torch" else nullcontext()
    with bridge.losses_by_step() as losses, seen.installed(), adam, applied_numbers() as applied:
        bridge_pretrain.pretrain(configuration(run), forward_step, callbacks)
    return {
        "losses": losses,
        "end": seen.end,
        "saves": seen.saves,
        "loaded": seen.loaded,
        "applied": applied,
        "progress": seen.progress,
    }


class _Observer:
    """Watches a run through names that Bridge looks up when it calls them."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.saves: list[dict[str, int]] = []
        self.loaded: oracle.Digests = {}
        self.end: oracle.Digests = {}
        self.progress: dict[str, float] = {}

    def installed(self) -> Any:
        from megatron.bridge.training import setup

        return patch.object(setup, "create_checkpoint_manager", self._watched(setup.create_checkpoint_manager))

    def _watched(self, create: Any) -> Any:
        def watched(config: Any) -> Any:
            manager = create(config)
            save, load = manager.save, manager.load

            def counted_save(context: Any, callbacks: Any = None) -> None:
                with count_collectives() as counts:
                    save(context, callbacks)
                self.saves.append(dict(counts.collectives))
                self.end = self._digests(context)

            def watched_load(context: Any) -> Any:
                result = load(context)
                self.loaded, self.progress = self._digests(context), dict(vars(context.state.train_state))
                return result

            manager.save, manager.load = counted_save, watched_load
            return manager

        return watched

    def _digests(self, context: Any) -> oracle.Digests:
        return oracle.live(Trainable(self.run.recipe, context.model[0], context.optimizer))


def configuration(run: Run) -> Any:
    """Bridge's configuration of a run."""
    from megatron.bridge.training.config import CheckpointConfig

    checkpoint = CheckpointConfig(
        save=run.directory, load=run.directory, save_interval=run.save_every, ckpt_format=run.format
    )
    config = bridge.configuration(run.recipe, run.iterations, checkpoint)
    if run.adapters:
        from megatron.bridge.peft.lora import LoRA

        config.peft = LoRA()
    for name, value in run.config.items():
        section, _, attribute = name.rpartition(".")
        setattr(getattr(config, section), attribute, value)
    return config
