# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The bits that this rank holds of a model and its optimizer, found without the code that saves them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import xxhash

from testing.models import Trainable

_AT_ONCE = 1 << 26  # bytes


def tensors(run: Trainable) -> Iterator[tuple[str, torch.Tensor]]:
    """Named weights and slots of the optimizer, where this rank has elements of them; not the masters of weights."""
    module = run.model.module
    module.state_dict(keep_vars=True)  # puts the distributed parameters in place
    state = run.optimizer.optimizer.state
    for name, parameter in module.named_parameters():
        slots = {f"{name} {slot}": value for slot, value in state.get(parameter, {}).items() if slot != "master_param"}
        for key, value in ({name: parameter} | slots).items():
            if isinstance(value, torch.Tensor) and _local(value).numel():
                yield key, _local(value)


def digests(run: Trainable) -> dict[str, str]:
    """A hash of each of these, and the FP8 scaling state of every module that has one."""
    return {name: _digest(tensor) for name, tensor in tensors(run)} | scaling(run)


def clear(run: Trainable) -> None:
    """Set all of it to zero, so that whatever is there afterwards was loaded."""
    for _, tensor in tensors(run):
        tensor.zero_()


def host_copies(run: Trainable) -> list[torch.Tensor]:
    """The weights that HybridDeviceOptimizer keeps on the host; none where another optimizer trains."""
    copies = getattr(run.optimizer.optimizer, "cpu_copys_map_gpu_param", {})
    return [copy for copy in copies if copy.numel()]


def scaling(run: Trainable) -> dict[str, str]:
    """Scales and amax histories of Transformer Engine's modules, as text."""
    found = {}
    for name, module in run.model.named_modules():
        for direction, meta in getattr(module, "fp8_meta", {}).items():
            for part in ("scale", "amax_history"):
                value = getattr(meta, part, None)
                if value is not None:
                    found[f"{name} {direction} {part}"] = str(value.tolist())
    return found


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.detach()


def _digest(tensor: torch.Tensor) -> str:
    hasher = xxhash.xxh3_128(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for part in tensor.contiguous().reshape(-1).view(torch.uint8).split(_AT_ONCE):
        hasher.update(_staging()[: part.numel()].copy_(part).numpy())
    return hasher.hexdigest()


@cache
def _staging() -> torch.Tensor:
    """Pinned memory, kept: a fresh copy on the host of gigabytes takes ten times as long."""
    return torch.empty(_AT_ONCE, dtype=torch.uint8, pin_memory=True)
