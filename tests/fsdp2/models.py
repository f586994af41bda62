# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Models under FSDP2 that have one of everything, in each layout, with each optimizer; and what they hold, whole."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH = 6


@dataclass(frozen=True)
class Layout:
    """How the ranks of a run share the model; the rest of them is data-parallel.

    Args:
        tensor: Tensor-parallel size.
        replicas: Of HSDP.
        dim: Dimension that FSDP shards of matrices whose size divides evenly.
        experts: Whether the experts have a mesh of their own, of half the ranks.
        compiled: Whether blocks are compiled.
        recomputed: Whether blocks are recomputed in the backward pass.
        mixed: Whether the forward pass computes in bfloat16.
        offloaded: Whether parameters lie on the host, as `CPUOffloadPolicy` has it.
    """

    tensor: int = 1
    replicas: int = 1
    dim: int = 0
    experts: bool = False
    compiled: bool = False
    recomputed: bool = False
    mixed: bool = False
    offloaded: bool = False


class Block(nn.Module):
    """Odd sizes, so that shards are uneven and some are empty."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH, bias=False)
        self.experts = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.unused = nn.Linear(2, 3, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """A residual block."""
        self.seen += 1
        hidden = self.down(torch.nn.functional.gelu(self.up(self.norm(inputs))))
        result: torch.Tensor = inputs + self.scale.to(inputs.dtype) * hidden + self.experts(inputs)
        return result


class Model(nn.Module):
    """Two blocks between tied weights, one weight that is frozen, and one that `fully_shard` is told to ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(WIDTH, 3)
        self.frozen.requires_grad_(requires_grad=False)
        self.ignored = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """A number of each row."""
        hidden = self.embedding(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        result: torch.Tensor = self.head(hidden).float() @ self.ignored.t() + self.frozen(hidden).float()
        return result


def build(layout: Layout, seed: int) -> Model:
    """The model in a layout; with another seed, other weights."""
    torch.manual_seed(seed)
    model = Model()
    world = dist.get_world_size()
    sizes = {"replicas": layout.replicas, "data": world // (layout.replicas * layout.tensor), "tensor": layout.tensor}
    used = {name: size for name, size in sizes.items() if size > 1 or name == "data"}
    mesh = init_device_mesh("cpu", tuple(used.values()), mesh_dim_names=tuple(used))
    if layout.tensor > 1:
        for block in model.blocks:
            parallelize_module(
                block, mesh["tensor"], {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
            )
    data = mesh["replicas", "data"] if layout.replicas > 1 else mesh["data"]
    for number, block in enumerate(model.blocks):
        model.blocks[number] = _sharded_block(block, data, layout)
    _shard(model, data, layout, ignored_params={model.ignored})
    return model


def _sharded_block(block: Any, data: DeviceMesh, layout: Layout) -> Any:
    if layout.experts:
        half = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("across", "within"))
        _shard(block.experts, half, layout)
    if layout.recomputed:
        block = checkpoint_wrapper(block)
    if layout.compiled:
        block = torch.compile(block, backend="eager")
    _shard(block, data, layout)
    return block


def _shard(module: nn.Module, mesh: DeviceMesh, layout: Layout, **more: Any) -> None:
    def placement(parameter: nn.Parameter) -> Shard | None:
        ways = mesh.size(mesh.ndim - 1) * (layout.tensor if isinstance(parameter, DTensor) else 1)
        even = parameter.ndim > layout.dim and parameter.shape[layout.dim] % ways == 0
        return Shard(layout.dim) if layout.dim and even else None

    if layout.mixed:
        more["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if layout.offloaded:
        more["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    fully_shard(module, mesh=mesh, shard_placement_fn=placement, **more)


def optimizer_of(name: str, model: Model) -> torch.optim.Optimizer:
    """An optimizer over all that is trained, in two param groups."""
    trained = [p for p in model.parameters() if p.requires_grad and p is not model.ignored]
    groups = [  # kernels for many tensors at a time take none but DTensors, or none of them
        {"params": [model.ignored]},
        {"params": [p for p in trained if p.ndim > 1], "lr": 0.02},
        {"params": [p for p in trained if p.ndim <= 1]},
    ]
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "AdamW": (torch.optim.AdamW, {}),
        "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
        "AdamW fused": (torch.optim.AdamW, {"fused": True}),
        "AdamW capturable": (torch.optim.AdamW, {"capturable": True, "lr": torch.tensor(0.01)}),
        "AdamW amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
        "SGD": (torch.optim.SGD, {}),
        "SGD momentum": (torch.optim.SGD, {"momentum": 0.9}),
    }
    kind, settings = kinds[name]
    if settings.get("capturable"):  # of devices that capture graphs; what it computes is the same
        module: Any = importlib.import_module("torch.optim.adam")
        module._get_capturable_supported_devices = lambda supports_xla=True: ["cpu"]
    made: torch.optim.Optimizer = kind(groups, **{"lr": 0.01, **settings})
    return made


def train(model: Model, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Losses of some steps, each of rows of its own."""
    losses = []
    for step in steps:
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(inputs).pow(2).mean()
        loss.backward()
        if model.ignored.grad is not None:
            dist.all_reduce(model.ignored.grad, op=dist.ReduceOp.SUM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def held(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights, buffers and optimizer state by name, whole, put together by torch alone.

    DTensors of even shards by `full_tensor`; of uneven ones under tensor parallelism torch knows no right offsets.
    """
    found = dict(_named(model, optimizer))
    return {name: _whole(tensor) for name, tensor in found.items()}


def _named(model: Model, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    wrappers = ("_orig_mod.", "_checkpoint_wrapped_module.")
    names: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        for wrapper in wrappers:
            name = name.replace(wrapper, "")
        names.setdefault(id(tensor), name)
        yield f"model.{name}", tensor
    for parameter, state in optimizer.state.items():
        for slot, value in state.items():
            if isinstance(value, torch.Tensor):
                yield f"optimizer.state.{names[id(parameter)]}.{slot}", value


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        value = tensor.detach()
        if not isinstance(value, DTensor):
            return value.clone()
        replicated = value.redistribute(value.device_mesh, [Replicate()] * value.device_mesh.ndim)
        return replicated.to_local().clone()
