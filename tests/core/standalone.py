# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do with the package `megatron-fsdp` alone: its own functions wrap a plain model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.live.tensors import local_shard
from testing.kernels import replace_cuda_only_kernels
from tests.core.oracle import Block, assembled

WIDTH = 10
FSDP, TP, OUTER = "fsdp", "tp", "outer"


@dataclass(frozen=True)
class Layout:
    """How the ranks of a run share the model; the rest of them is data-parallel."""

    strategy: str = "optim_grads_params"
    tensor: int = 1
    outer: int = 1


class Residual(torch.nn.Module):
    """Parameters of odd sizes, with and without biases, and a buffer."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 14)
        self.down = torch.nn.Linear(14, WIDTH, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """A residual block."""
        self.seen += 1
        hidden = self.up(self.norm(inputs))
        result: torch.Tensor = inputs + self.down(torch.nn.functional.gelu(hidden))
        return result


def _mesh(layout: Layout) -> DeviceMesh:
    """Along the outermost dimension first; a joined one of both data-parallel dimensions where there are two."""
    inner = dist.get_world_size() // (layout.tensor * layout.outer)
    if layout.outer == 1:
        return init_device_mesh("cuda", (inner, layout.tensor), mesh_dim_names=(FSDP, TP))
    return init_device_mesh("cuda", (layout.outer, inner, layout.tensor), mesh_dim_names=(OUTER, FSDP, TP))


def build(layout: Layout, seed: int) -> tuple[Any, Any]:
    """The model and its optimizer, wrapped by `megatron_fsdp`."""
    from megatron_fsdp import fully_shard_model, fully_shard_optimizer

    replace_cuda_only_kernels()
    torch.manual_seed(seed)
    model = torch.nn.Sequential(Residual(), Residual(), torch.nn.Linear(WIDTH, 7, bias=False))
    mesh = _mesh(layout)
    if layout.tensor > 1:
        parallelize_module(
            model, mesh[TP], {f"{block}.up": ColwiseParallel(output_layouts=Replicate()) for block in range(2)}
        )
    outer: dict[str, Any] = {}
    if layout.outer > 1:
        outer = {"dp_outer_dim": OUTER, "hybrid_fsdp_group": mesh[OUTER, FSDP]._flatten().get_group()}
    wrapped = fully_shard_model(
        model,
        device_mesh=mesh,
        dp_shard_dim=FSDP,
        tp_dim=TP,
        fsdp_unit_modules=[Residual],
        zero_dp_strategy=layout.strategy,
        device=torch.device("cpu"),
        calculate_per_token_loss=True,  # without it gradients are scaled by an operation that gloo does not have
        **outer,
    )
    return wrapped, fully_shard_optimizer(torch.optim.AdamW(wrapped.parameters(), lr=1e-2))


def _train(model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(inputs).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def train_and_resume(directory: str, layout: Layout) -> tuple[list[float], list[float]]:
    """Losses after a save, and after a load of it into another model."""
    model, optimizer = build(layout, seed=1)
    _train(model, optimizer, range(2))
    mbridge_fsdp_ckpt.save(directory, model=model, optimizer=optimizer)
    through = _train(model, optimizer, range(2, 4))
    model, optimizer = build(layout, seed=2)
    mbridge_fsdp_ckpt.load(directory, model=model, optimizer=optimizer)
    return through, _train(model, optimizer, range(2, 4))


def train_and_save(directory: str, layout: Layout) -> dict[str, torch.Tensor]:
    """What is saved: see `_gathered`."""
    model, optimizer = build(layout, seed=1)
    _train(model, optimizer, range(2))
    mbridge_fsdp_ckpt.save(directory, model=model, optimizer=optimizer)
    return _gathered(model, optimizer)


def _gathered(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Parameters, buffers and moments, whole, put together at the offsets that `megatron_fsdp` itself computes."""
    from megatron_fsdp.uneven_dtensor import gather_and_compute_chunk_metadata

    own: dict[str, Block] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.nn.Parameter):
            own[name] = tuple(tensor.shape), (0,) * tensor.dim(), tensor.clone()
            continue
        offsets = tuple(gather_and_compute_chunk_metadata(tensor).offsets)
        moments = {f"{name}.{slot}": value for slot, value in optimizer.state[tensor].items() if slot != "step"}
        for key, held in {name: tensor, **moments}.items():
            own[key] = tuple(tensor.shape), offsets, local_shard(held).clone()
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, own)
    keys = sorted({key for one in everybodys for key in one})
    return {key: assembled([one[key] for one in everybodys if key in one]) for key in keys}


def load(directory: str, layout: Layout) -> dict[str, torch.Tensor]:
    """What another model holds after a load."""
    model, optimizer = build(layout, seed=2)
    mbridge_fsdp_ckpt.load(directory, model=model, optimizer=optimizer)
    return _gathered(model, optimizer)
