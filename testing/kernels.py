# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Python stand-ins for the CUDA-only kernels that a training step of Megatron-Bridge reaches.

They compute what the kernels compute, in fp32 and without their speed.  What is not installed is left alone.
"""

from __future__ import annotations

import copy
import importlib
import sys
from typing import Any

import torch

from mbridge_fsdp_ckpt.patching import Patches, rebindings


def adam_stand_in(
    _chunk_size: int,
    _no_op_flag: torch.Tensor,
    tensor_lists: list[list[torch.Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    *_: Any,
) -> None:
    """Stands in for `transformer_engine_torch.multi_tensor_adam`, FusedAdam's kernel.

    The lists hold gradients, parameters, first and second moments and, where FusedAdam keeps them, fp32 master
    weights.  Mode 1 decays weights as AdamW does, mode 0 adds the decay to the gradient.
    """
    correction1, correction2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    with torch.no_grad():
        for grad, param, exp_avg, exp_avg_sq, *master in zip(*tensor_lists, strict=True):
            weight = (master[0] if master else param).float()
            gradient = grad.float() if mode == 1 else grad.float() + weight_decay * weight
            first = beta1 * exp_avg.float() + (1 - beta1) * gradient
            second = beta2 * exp_avg_sq.float() + (1 - beta2) * gradient.square()
            update = (first / correction1) / ((second / correction2).sqrt() + eps)
            weight = weight - lr * (update + weight_decay * weight if mode == 1 else update)
            for target, value in ((exp_avg, first), (exp_avg_sq, second), (param, weight)):
                target.copy_(value)
            if master:
                master[0].copy_(weight)


def l2_norm_stand_in(
    _chunk_size: int, _no_op_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]], per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for `transformer_engine_torch.multi_tensor_l2norm`: the norm of all, and of each if asked for."""
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]])
    return norms.norm().reshape(1), norms if per_tensor else norms.new_empty(0)


def scale_stand_in(
    _chunk_size: int,
    _no_op_flag: torch.Tensor,
    tensor_lists: list[list[torch.Tensor]],
    scale: float | torch.Tensor,
) -> None:
    """Stands in for `transformer_engine_torch.multi_tensor_scale` and `multi_tensor_scale_tensor`."""
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)


def l2_normalize_stand_in(x: torch.Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Stands in for `fla.modules.l2norm.l2norm`, a Triton kernel that Gated DeltaNet applies to queries and keys."""
    normalized = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
    return normalized if output_dtype is None else normalized.to(output_dtype)


def compile_nothing() -> None:
    """Stands in for `megatron.core.datasets.utils.compile_helpers`, which runs make: the wheel ships the result."""


class CpuNorm:
    """Stands in for Transformer Engine's norms (`TENorm`): a torch norm, called like Megatron's norm builders.

    Unlike Megatron's own wrapper of torch's norms it serves sequence-parallel layers too, whose norm parameters
    Megatron wants marked because their gradients are partial sums.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        """Build the norm: this class is never instantiated itself."""
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm: Any = WrappedTorchNorm(config=plain, hidden_size=hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def let_mamba_be_built() -> None:
    """Give Megatron's Mamba layer the norm that it takes from mamba_ssm, which cannot be built without CUDA."""
    from megatron.core.ssm import mamba_mixer

    from mbridge_fsdp_ckpt.integrations.bridge.without_gpu import ExtendedRMSNorm

    if not mamba_mixer.HAVE_MAMBA_SSM:
        mamba_mixer.HAVE_MAMBA_SSM, mamba_mixer.ExtendedRMSNorm = True, ExtendedRMSNorm


_MEGATRON_TE = "megatron.core.extensions.transformer_engine"

# Importing the Python package is what loads the extension module.
_TE, _TE_EXTENSION = "transformer_engine.pytorch", "transformer_engine_torch"

_STAND_INS: tuple[tuple[str, str, Any], ...] = (
    (_TE_EXTENSION, "multi_tensor_adam", adam_stand_in),
    (_TE_EXTENSION, "multi_tensor_l2norm", l2_norm_stand_in),
    (_TE_EXTENSION, "multi_tensor_scale", scale_stand_in),
    (_TE_EXTENSION, "multi_tensor_scale_tensor", scale_stand_in),
    ("fla.modules.l2norm", "l2norm", l2_normalize_stand_in),
    ("megatron.core.datasets.utils", "compile_helpers", compile_nothing),
    # cuBLAS through Transformer Engine: Megatron's router and linear layers use torch.matmul where it is missing
    (_MEGATRON_TE, "te_general_gemm", None),
)

_replacements: dict[tuple[str, str], tuple[Any, Any]] = {}
"""Each kernel that was found, and its stand-in."""
_rebindings: list[tuple[Any, str, Any]] = []
_looked_through: dict[int, Any] = {}
_active: Patches | None = None


def look_for_kernels() -> None:
    """Find the kernels in all modules that were not looked through before.

    All names of Megatron-Bridge's modules take a third of a second, and in a process that was forked from another most
    of the memory that they lie in is copied.  So templates of ranks look, and ranks replace what was found.
    """
    _find(_TE, "")
    for module, name, stand_in in _STAND_INS:
        if (module, name) not in _replacements and (kernel := _find(module, name)) is not None:
            _replacements[module, name] = kernel, stand_in
    new = [module for module in list(sys.modules.values()) if id(module) not in _looked_through]
    _rebindings.extend(rebindings(_replacements.values(), new))
    _looked_through.update((id(module), module) for module in new)


def replace_cuda_only_kernels() -> None:
    """Put the stand-ins in place, wherever loaded modules bind the kernels.  A second call does nothing."""
    global _active
    if _active is not None:
        return
    look_for_kernels()
    _active = Patches()
    for rebinding in _rebindings:
        _active.set(*rebinding)
    te_norm = _find(_MEGATRON_TE, "TENorm")
    if te_norm is not None:
        _active.set(te_norm, "__new__", CpuNorm.__new__)


def restore_kernels() -> None:
    """Undo `replace_cuda_only_kernels`.  Calling it again does nothing."""
    global _active
    if _active is not None:
        _active.undo()
        _active = None


def _find(module: str, name: str) -> Any | None:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
