# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Building a Megatron model on a machine without a GPU, to convert weights: nothing runs forward.

Megatron-Core and Transformer Engine create some tensors on "cuda" by name even with `use_cpu_initialization`, refuse
to build layers where `torch.cuda.is_available()` is false, and keep random states of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mbridge_fsdp_ckpt.patching import Patches

_CPU, _META = torch.device("cpu"), torch.device("meta")
_INDEX = 0  # of the current device: CUDA's answer is a number, which callers put into `torch.device("cuda", ...)`
_CAPABILITY = (9, 0)  # of a device that is refused nothing


def as_if_there_was_one() -> AbstractContextManager[None]:
    """Let the layers of a model be built; every tensor lands on the CPU.  Does nothing where there is a GPU."""
    return nullcontext() if torch.cuda.is_available() else _pretending(_CPU)


@contextmanager
def without_memory() -> Iterator[None]:
    """Let the layers of a model be built of tensors that have none, where there is a GPU, too."""
    with _pretending(_META), _META:
        yield


@contextmanager
def _pretending(device: torch.device) -> Iterator[None]:
    """Let tensors that are made on "cuda" land on a device."""
    with Patches() as patches:
        _patch(patches)
        with _On(device):
            yield


@contextmanager
def current_device_is_cpu_without_gpu() -> Iterator[None]:
    """Leave tensors on the CPU where code moves them to `torch.cuda.current_device()`; do nothing if there is a GPU."""
    if torch.cuda.is_available():
        yield
        return
    with Patches() as patches, _On(_CPU):
        patches.set(torch.cuda, "current_device", _always(_INDEX))
        yield


def _patch(patches: Patches) -> None:
    from megatron.core.ssm import mamba_mixer
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    patches.set(torch.cuda, "is_available", _always(True))
    patches.set(torch.cuda, "current_device", _always(_INDEX))
    patches.set(torch.cuda, "get_device_capability", _always(_CAPABILITY))
    patches.set(torch.cuda, "Stream", _always(None))
    patches.set(CudaRNGStatesTracker, "fork", lambda *_, **__: nullcontext())
    if not mamba_mixer.HAVE_MAMBA_SSM:  # it cannot be installed without CUDA
        patches.set(mamba_mixer, "HAVE_MAMBA_SSM", True)
        patches.set(mamba_mixer, "ExtendedRMSNorm", ExtendedRMSNorm)


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


class _On(TorchFunctionMode):
    """Tensors that are asked for on "cuda" are made on this device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.device:
            made = func(*args, **kwargs)
            return self._device if _is_cuda(made) else made
        device = kwargs.get("device")
        if _is_cuda(device) or type(device) is int:
            kwargs = kwargs | {"device": self._device}
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], self._device, *args[2:])
        return func(*(self._device if _is_cuda(arg) else arg for arg in args), **kwargs)


def _is_cuda(argument: Any) -> bool:
    if isinstance(argument, torch.device):
        return argument.type == "cuda"
    return isinstance(argument, str) and argument.partition(":")[0] == "cuda"


class ExtendedRMSNorm(torch.nn.Module):
    """The parameter of mamba_ssm's gated norm; Megatron's Mamba layer only wants to hold it."""

    def __init__(self, hidden_size: int, *, device: Any = None, dtype: torch.dtype | None = None, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
