# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a user chooses of a job, and what its configuration says where they do not."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.tools.estimate.described import JobToEstimate, Kept, named, prepare, provider_of
from mbridge_fsdp_ckpt.tools.estimate.layout import JobLayout

SIZES = {
    "world": "world",
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "context",
    "ep": "expert",
    "etp": "expert_tensor",
    "outer": "instances",
}
"""Fields of `JobLayout`, by what the command calls them."""

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

Chosen = dict[str, Any]
"""Fields of a class, by name."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What was chosen.

    Args:
        layout: Fields of `JobLayout`.
        kept: Fields of `Kept`, precisions by name.
    """

    layout: Chosen
    kept: Chosen

    @classmethod
    def of(cls, sizes: Chosen, strategies: Chosen, kept: Chosen) -> Choices:
        """From what a command was given; None stands for nothing.

        Args:
            sizes: By the names of `SIZES`.
            strategies: Other fields of `JobLayout`.
            kept: Fields of `Kept`, precisions by name.
        """
        layout = {SIZES[name]: size for name, size in sizes.items()} | strategies
        return cls(_given(layout), _given(kept))

    @property
    def what_is_kept(self) -> Chosen:
        """Fields of `Kept`."""
        chosen = dict(self.kept)
        if "main" in chosen:
            chosen["main"] = torch.float32 if chosen["main"] == "float32" else None
        if "moments" in chosen:
            chosen["moments"] = (getattr(torch, chosen["moments"]),) * 2
        return chosen

    def laid_out(self, text: str) -> Choices:
        """The same with other sizes: `world=64,tp=2`.

        Raises:
            ConfigurationError: These are no sizes.
        """
        parts = [part.strip().partition("=") for part in text.split(",")]
        wrong = [f"{name}{mark}{size}" for name, mark, size in parts if name not in SIZES or not size.isdecimal()]
        if wrong or any(int(size) < 1 for _, _, size in parts):
            raise ConfigurationError(
                expected=f"--to with sizes such as world=64,tp=2, of {', '.join(SIZES)}",
                found=repr(wrong[0] if wrong else text),
                remedy="What is not named stays as it is.",
            )
        return Choices(self.layout | {SIZES[name]: int(size) for name, _, size in parts}, self.kept)


@dataclass(frozen=True, slots=True)
class Described:
    """A job as it was described.

    Args:
        name: As the user gave it.
        provider: Bridge's description of the model.
        layout: The layout.
        kept: What is kept of a parameter.
        bucket_size: Megatron's setting.
    """

    name: str
    provider: Any
    layout: JobLayout
    kept: Kept
    bucket_size: int | None = None

    def job(self) -> JobToEstimate:
        """The job, to be estimated.

        Raises:
            ConfigurationError: The layout does not fit the model.
        """
        return prepare(self.name, self.provider, self.layout, self.kept, self.bucket_size)


def describe(model: str, choices: Choices) -> Described:
    """The job of a model, in a layout.

    Args:
        model: A Hugging Face configuration, or `MODULE:FUNCTION`, where the function makes Bridge's configuration of a
            run; its layout and its optimizer are then the defaults.
        choices: What differs from that; the number of ranks is always chosen.

    Raises:
        ConfigurationError: There is no such thing, or the choices contradict each other.
    """
    if "world" not in choices.layout:
        raise ConfigurationError(expected="the number of ranks", found="none", remedy="Give --world.", key=model)
    if Path(model).exists() or not _FUNCTION.fullmatch(model):
        layout, kept = JobLayout(**choices.layout), Kept(**choices.what_is_kept)
        return Described(model, provider_of(model), layout, kept)
    with named(model):
        config = _made_by(model)
    layout = JobLayout(**(_layout_of(config) | choices.layout))
    return Described(
        model, config.model, layout, Kept(**(_kept_of(config) | choices.what_is_kept)), config.ddp.bucket_size
    )


def _made_by(name: str) -> Any:
    """What a function makes: Bridge's `ConfigContainer`."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)()


def _given(chosen: Chosen) -> Chosen:
    return {name: value for name, value in chosen.items() if value is not None}


def _layout_of(config: Any) -> Chosen:
    model, ddp = config.model, config.ddp
    return {
        "tensor": model.tensor_model_parallel_size,
        "pipeline": model.pipeline_model_parallel_size,
        "context": model.context_parallel_size,
        "expert": model.expert_model_parallel_size,
        "expert_tensor": model.expert_tensor_parallel_size or 1,
        "instances": ddp.num_distributed_optimizer_instances,
        "outer": ddp.outer_dp_sharding_strategy,
        "strategy": ddp.data_parallel_sharding_strategy,
    }


def _kept_of(config: Any) -> Chosen:
    optimizer = config.optimizer
    is_aware = optimizer.use_precision_aware_optimizer
    return {
        "main": getattr(config.ddp, "megatron_fsdp_main_params_dtype", torch.float32),
        "moments": (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype) if is_aware else (torch.float32,) * 2,
        "offload": optimizer.optimizer_offload_fraction if optimizer.optimizer_cpu_offload else 0.0,
    }
