# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""VeRL's own worker of an actor and its rollout, and a rollout engine in the place of vLLM, which needs a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from hydra import compose, initialize_config_module
from verl.checkpoint_engine.base import ColocatedCheckpointEngine
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.rollout.base import BaseRollout

from tests.core.beside import shared_memory


class Rollout(BaseRollout):  # type: ignore[misc]  # verl is untyped
    """Notes what it finds when it is woken, and how many weights it gets."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        """By what is woken, the shared memory that the actor's process has then."""
        self.weights = 0

    async def resume(self, tags: list[str]) -> None:
        """See `BaseRollout`."""
        self.found |= dict.fromkeys(tags, shared_memory(os.getpid()))

    async def update_weights(self, weights: Iterator[Any], wire_format: str = "named_tensors", **_: Any) -> None:
        """See `BaseRollout`."""
        self.weights = sum(1 for _ in weights)

    async def release(self) -> None:
        """See `BaseRollout`."""


class Elsewhere(ColocatedCheckpointEngine):  # type: ignore[misc]
    """Sends weights to a rollout on other devices."""

    weights = 0

    async def send_weights(self, weights: Iterator[Any], **_: Any) -> None:
        """See `CheckpointEngine`."""
        self.weights = sum(1 for _ in weights)


def worker_of(engine: Any) -> Any:
    """A worker over an engine, with what `init_model` gives it; that builds the engine itself, on a GPU alone."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", ["model_engine=megatron", "actor_rollout_ref.rollout.name=vllm"])
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor_rollout")
    worker.actor = TrainingWorker.__new__(TrainingWorker)
    worker.actor.engine = engine
    worker.rollout, worker.checkpoint_engine = Rollout(), Elsewhere(bucket_size=1 << 20)
    worker.layered_summon, worker.base_sync_done, worker.peft_merge = False, True, False
    return worker
