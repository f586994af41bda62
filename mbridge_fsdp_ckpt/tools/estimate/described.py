# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The job that is estimated, from a Hugging Face configuration or Bridge's: no network, no weights."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mbridge_fsdp_ckpt.errors import CheckpointError, ConfigurationError
from mbridge_fsdp_ckpt.integrations.bridge.choice import tokens_of
from mbridge_fsdp_ckpt.integrations.bridge.without_gpu import without_memory
from mbridge_fsdp_ckpt.tools.convert.hugging_face import Sizes, arrange, in_one_line
from mbridge_fsdp_ckpt.tools.estimate.layout import JobLayout, check_experts
from mbridge_fsdp_ckpt.tools.estimate.model import Subject
from mbridge_fsdp_ckpt.tools.estimate.shards import Sharding
from mbridge_fsdp_ckpt.tools.estimate.slots import Moments, Optimizer, Slots, slots_of

HALF = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Kept:
    """What is saved besides the shapes of weights.

    Args:
        optimizer: Which one keeps state.
        main: Of the main weights; None where the model's bf16 weights are trained.
        moments: Of FusedAdam's two moments.
        offload: The part of the optimizer that is on the hosts.
    """

    optimizer: Optimizer = "fused"
    main: torch.dtype | None = torch.float32
    moments: Moments = (torch.float32, torch.float32)
    offload: float = 0.0

    def slots(self) -> Slots:
        """What the optimizer keeps of a parameter.

        Raises:
            ConfigurationError: Parameters differ in that, by what is on the hosts.
        """
        is_mixed = 0 < self.offload < 1 and set(self.moments) != {torch.float32}
        if is_mixed:
            raise ConfigurationError(
                expected="moments of float32 where a part of the optimizer is on the hosts",
                found=f"--offload {self.offload}, and moments of {self.moments}",
                remedy="Estimate --offload 0 and --offload 1: what is saved lies between.",
            )
        kind: Optimizer = "torch" if self.is_torch else self.optimizer
        return slots_of(kind, self.main or HALF, self.moments, is_hybrid=self.offload > 0)

    @property
    def is_torch(self) -> bool:
        """Whether torch's AdamW keeps the state, as it does on hosts."""
        return self.optimizer == "torch" or (self.optimizer == "fused" and self.offload > 0)


@dataclass(frozen=True, slots=True)
class JobToEstimate:
    """A job to be estimated.

    Args:
        name: What it was made from.
        layout: Its layout.
        subject: Makes the model of the pipeline stage of the rank that this process passes for (`world.as_rank`).
    """

    name: str
    layout: JobLayout
    subject: Callable[[], Subject]


def prepare(name: str, provider: Any, layout: JobLayout, kept: Kept, bucket_size: int | None = None) -> JobToEstimate:
    """A job from Bridge's description of its model.

    Raises:
        ConfigurationError: The layout does not fit the model.
    """
    check_experts(layout, int(getattr(provider, "num_moe_experts", None) or 0))
    with named(name):
        arrange(provider, HALF, Sizes(layout.tensor, layout.context, layout.expert, layout.expert_tensor))
        provider.pipeline_model_parallel_size = layout.pipeline
        provider.finalize()
    slots = kept.slots()

    def subject() -> Subject:
        with named(name), without_memory(), redirect_stdout(io.StringIO()):  # Bridge prints its size
            chunks = provider.provide_distributed_model(
                wrap_with_ddp=False, init_model_with_meta_device=True, bf16=True
            )
        return Subject(chunks[0], Sharding(chunks[0], layout, bucket_size), kept.main, slots, tokens_of(provider))

    return JobToEstimate(name, layout, subject)


def provider_of(place: str) -> Any:
    """Bridge's description of the model of a Hugging Face configuration: a directory, or a file `config.json`.

    Raises:
        ConfigurationError: There is none, or Bridge does not know the model.
    """
    path = Path(place).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigurationError(
            expected="a Hugging Face config.json, a directory that has one, or MODULE:FUNCTION",
            found="no such file",
            remedy="A function makes the configuration of a run with Megatron-Bridge.",
            key=place,
        )
    with named(place):
        from megatron.bridge import AutoBridge
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
        return AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)


@contextmanager
def named(place: str) -> Iterator[None]:
    """Whatever Bridge, Megatron and transformers make of a configuration has a name."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise ConfigurationError(
            expected="a configuration and a layout that the installed Megatron-Bridge builds a model from",
            found=f"{type(error).__name__}: {in_one_line(error)}",
            remedy="Change the sizes, or the configuration.",
            key=place,
        ) from error
