# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The job that is estimated: what a user chooses of it, and what its configuration says; no network, no weights."""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from mbridge_fsdp_ckpt.errors import CheckpointError, ConfigurationError
from mbridge_fsdp_ckpt.integrations.bridge.choice import tokens_of
from mbridge_fsdp_ckpt.integrations.bridge.without_gpu import as_if_there_was_one, without_memory
from mbridge_fsdp_ckpt.live.optimizer.adapters import adapter_for
from mbridge_fsdp_ckpt.live.optimizer.base import STEP, SlotSpec
from mbridge_fsdp_ckpt.tools.convert.hugging_face import Sizes, arrange, in_one_line
from mbridge_fsdp_ckpt.tools.estimate.layout import JobLayout, check_experts
from mbridge_fsdp_ckpt.tools.estimate.model import Slots, Subject
from mbridge_fsdp_ckpt.versions import require

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

Optimizer = Literal["fused", "torch", "none"]
"""Transformer Engine's FusedAdam, which Megatron takes; torch's, which it takes for what is on the host; none."""

Moments = tuple[torch.dtype, torch.dtype]
Chosen = dict[str, Any]
"""Fields of a class, by name."""

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_HALF, _SINGLE = torch.bfloat16, torch.float32


def chosen_layout(sizes: Chosen, outer: str | None, strategy: str | None) -> Chosen:
    """Fields of `JobLayout` from what a command was given, sizes by the names of `SIZES`; None stands for nothing."""
    layout = {SIZES[name]: size for name, size in sizes.items()} | {"outer": outer, "strategy": strategy}
    return {name: value for name, value in layout.items() if value is not None}


def chosen_kept(optimizer: str | None, main: str | None, moments: str | None, offload: float | None) -> Chosen:
    """Fields of `Kept`, likewise; precisions by name."""
    kept: Chosen = {} if main is None else {"main": _SINGLE if main == "float32" else None}
    kept |= {} if moments is None else {"moments": (getattr(torch, moments),) * 2}
    kept |= {} if optimizer is None else {"optimizer": optimizer}
    return kept | ({} if offload is None else {"offload": offload})


def sizes_of(text: str) -> Chosen:
    """Fields of `JobLayout` from sizes such as `world=64,tp=2`.

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
    return {SIZES[name]: int(size) for name, _, size in parts}


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
    main: torch.dtype | None = _SINGLE
    moments: Moments = (_SINGLE, _SINGLE)
    offload: float = 0.0

    def slots(self) -> Slots:
        """What the optimizer keeps of a parameter after the first step, asked of itself over one of two elements.

        Raises:
            ConfigurationError: Parameters differ in that, by what is on the hosts.
            UnsupportedVersionError: Transformer Engine is not installed.
        """
        if 0 < self.offload < 1 and set(self.moments) != {_SINGLE}:
            raise ConfigurationError(
                expected="moments of float32 where a part of the optimizer is on the hosts",
                found=f"--offload {self.offload}, and moments of {self.moments}",
                remedy="Estimate --offload 0 and --offload 1: what is saved lies between.",
            )
        parameter = torch.nn.Parameter(torch.zeros(2, dtype=self.main or _HALF))
        slots: Slots = {}
        if self.optimizer != "none":
            kept = adapter_for(_torch(parameter) if self.is_torch else _fused(parameter, self.moments)).slots(parameter)
            slots = {name: SlotSpec(slot.kind, slot.tensor.dtype) for name, slot in kept.items()}
        if self.offload > 0 and slots:
            slots.setdefault(STEP, SlotSpec("tensor", _SINGLE))  # HybridDeviceOptimizer counts steps a parameter
        return slots

    @property
    def is_torch(self) -> bool:
        """Whether torch's AdamW keeps the state, as it does on hosts."""
        return self.optimizer == "torch" or (self.optimizer == "fused" and self.offload > 0)


def _torch(parameter: torch.nn.Parameter) -> Any:
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


def _fused(parameter: torch.nn.Parameter, moments: Moments) -> Any:
    require("FusedAdam")
    from transformer_engine.pytorch.optimizers import FusedAdam

    with as_if_there_was_one():
        optimizer = FusedAdam([parameter], exp_avg_dtype=moments[0], exp_avg_sq_dtype=moments[1])
        optimizer.initialize_state(parameter, store_param_remainders=False)
    return optimizer


@dataclass(frozen=True, slots=True)
class JobToEstimate:
    """A job to be estimated.

    Args:
        name: What it was made from.
        layout: Its layout.
        subject: Makes the model of the pipeline stage of the rank that this process passes for (`model.as_rank`).
    """

    name: str
    layout: JobLayout
    subject: Callable[[], Subject]


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
        provider, layout = self.provider, self.layout
        check_experts(layout, int(getattr(provider, "num_moe_experts", None) or 0))
        with _named(self.name):
            arrange(provider, _HALF, Sizes(layout.tensor, layout.context, layout.expert, layout.expert_tensor))
            provider.pipeline_model_parallel_size = layout.pipeline
            provider.finalize()
        slots = self.kept.slots()

        def subject() -> Subject:
            with _named(self.name), without_memory(), redirect_stdout(io.StringIO()):  # Bridge prints its size
                (module, *_) = provider.provide_distributed_model(
                    wrap_with_ddp=False, init_model_with_meta_device=True, bf16=True
                )
            return Subject(module, layout, self.kept.main, slots, self.bucket_size, tokens_of(provider))

        return JobToEstimate(self.name, layout, subject)


def describe(model: str, layout: Chosen, kept: Chosen) -> Described:
    """The job of a model, in a layout.

    Args:
        model: A Hugging Face configuration, or `MODULE:FUNCTION`, where the function makes Bridge's configuration of a
            run; its layout and its optimizer are then the defaults.
        layout: Fields of `JobLayout` that differ from that; the number of ranks is always chosen.
        kept: Fields of `Kept` that do.

    Raises:
        ConfigurationError: There is no such thing, or the choices contradict each other.
    """
    if "world" not in layout:
        raise ConfigurationError(expected="the number of ranks", found="no --world", remedy="Give --world.", key=model)
    if Path(model).exists() or not _FUNCTION.fullmatch(model):
        laid_out = JobLayout(**layout)  # it is checked before the model is looked for
        return Described(model, _provider_of(model), laid_out, Kept(**kept))
    with _named(model):
        module, _, function = model.partition(":")
        config = getattr(importlib.import_module(module), function)()
    laid_out = JobLayout(**(_layout_of(config) | layout))
    return Described(model, config.model, laid_out, Kept(**(_kept_of(config) | kept)), config.ddp.bucket_size)


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
        "main": getattr(config.ddp, "megatron_fsdp_main_params_dtype", _SINGLE),
        "moments": (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype) if is_aware else (_SINGLE, _SINGLE),
        "offload": optimizer.optimizer_offload_fraction if optimizer.optimizer_cpu_offload else 0.0,
    }


def _provider_of(place: str) -> Any:
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
    with _named(place):
        from megatron.bridge import AutoBridge
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
        return AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)


@contextmanager
def _named(place: str) -> Iterator[None]:
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
