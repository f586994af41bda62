# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of frozen weights in FP8: a base model under an adapter, say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.live.tensors import local_shard
from testing.kernels import replace_cuda_only_kernels
from testing.models import config, initialise, under_fsdp


class Adapted(torch.nn.Module):
    """A trainable layer over a frozen one, in FP8 where it has a scale."""

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.config = config(hidden_size=8)
        self.adapter = torch.nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
        self.base = torch.nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
        values = torch.ones(8, 8, dtype=torch.bfloat16) if scale is None else _in_fp8(scale)
        del self.base.weight
        self.base.weight = torch.nn.Parameter(values, requires_grad=False)


def _in_fp8(scale: float) -> Any:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer, Float8Tensor

    e4m3 = tex.DType.kFloat8E4M3
    return Float8Tensor(
        shape=(8, 8),
        dtype=torch.bfloat16,
        data=torch.full((8, 8), 56, dtype=torch.uint8),  # ones
        fp8_scale_inv=torch.tensor([scale]),
        fp8_dtype=e4m3,
        quantizer=Float8Quantizer(scale=1 / torch.tensor([scale]), amax=torch.zeros(1), fp8_dtype=e4m3),
    )


def wrapped(strategy: str, scale: float | None = 0.5) -> Any:
    """The model under Megatron-FSDP."""
    replace_cuda_only_kernels()
    initialise(1)
    return under_fsdp(Adapted(scale), strategy, 1, "no_shard")


def wrap(strategy: str) -> str:
    """What Megatron-FSDP says to it."""
    try:
        wrapped(strategy)
    except RuntimeError as error:
        return str(error)
    return ""


def save_and_load(directory: str) -> dict[str, Any]:
    """Errors of a save and of a load of everything; whether a save and a load of the adapter alone work."""
    model, plain = wrapped("no_shard", scale=4.0), wrapped("no_shard", scale=None)
    mbridge_fsdp_ckpt.save(f"{directory}/plain", model=plain)
    live = _weight(model)
    live.zero_()
    errors = [
        _error(lambda: mbridge_fsdp_ckpt.save(f"{directory}/all", model=model)),
        _error(lambda: mbridge_fsdp_ckpt.load(f"{directory}/plain", model=model)),
    ]
    untouched = not live.any()
    mbridge_fsdp_ckpt.load(f"{directory}/plain", model=model, include=lambda key: ".adapter." in key)
    loaded = torch.equal(live, _weight(plain))
    mbridge_fsdp_ckpt.save(f"{directory}/adapter", model=model, include=lambda key: ".adapter." in key)
    return {"errors": errors, "untouched": untouched, "loaded": loaded}


def _weight(model: Any) -> torch.Tensor:
    return local_shard(model.module.state_dict(keep_vars=True)["module.adapter.weight"])


def _error(action: Callable[[], Any]) -> list[str]:
    try:
        action()
    except CheckpointError as error:
        return [type(error).__name__, str(error)]
    return []
