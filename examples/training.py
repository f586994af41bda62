# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What the examples train: a small model, wrapped by the package `megatron-fsdp`.

A real job has all of this already.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_fsdp import fully_shard_model, fully_shard_optimizer
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

WIDTH, CLASSES, BATCH = 64, 16, 12
TRACKER = "latest_checkpointed_iteration.txt"  # the name that Megatron gives it, so that the command finds it, too


class Block(torch.nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise, widen, narrow, add."""
        result: torch.Tensor = hidden + self.down(torch.nn.functional.gelu(self.up(self.norm(hidden))))
        return result


class Job:
    """The model, its optimizer and its training step, on the ranks of this job.

    Args:
        tensor: The tensor-parallel size; Megatron-FSDP shards over the ranks that are left.
        seed: Of the initial weights.
    """

    def __init__(self, tensor: int = 1, seed: int = 1) -> None:
        shape = (dist.get_world_size() // tensor, tensor)
        self.mesh: DeviceMesh = init_device_mesh("cuda", shape, mesh_dim_names=("fsdp", "tp"))
        torch.manual_seed(seed)
        model = torch.nn.Sequential(Block(), Block(), torch.nn.Linear(WIDTH, CLASSES, bias=False)).cuda()
        if tensor > 1:
            columns = ColwiseParallel(output_layouts=Replicate())
            parallelize_module(model, self.mesh["tp"], {"0.up": columns, "1.up": columns})
        self.model: Any = fully_shard_model(
            model,
            device_mesh=self.mesh,
            dp_shard_dim="fsdp",
            tp_dim="tp",
            fsdp_unit_modules=[Block],
            device=torch.device("cuda", torch.cuda.current_device()),
            calculate_per_token_loss=True,  # gradients are summed over ranks: `step` divides by the whole batch
        )
        self.optimizer: Any = fully_shard_optimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-2))

    def step(self, number: int) -> float:
        """One step on the batch of this number; the loss over all ranks."""
        inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
        group = self.mesh["fsdp"].get_group()
        own = inputs.tensor_split(group.size())[group.rank()].cuda()
        loss = self.model(own).pow(2).sum() / (BATCH * CLASSES)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        if dist.get_rank() == 0:
            print(f"step {number + 1} loss {float(total)!r}", flush=True)
        return float(total)


def begin(description: str | None) -> argparse.Namespace:
    """Read the command line and start torch.distributed, as torchrun set it up."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the checkpoints are, on storage that all ranks share")
    parser.add_argument("--steps", type=int, default=4, help="train up to this step (default: %(default)s)")
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel size (default: %(default)s)")
    parser.add_argument("--backend", default="nccl", help="of torch.distributed (default: %(default)s)")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(options.backend)
    return options


def place(folder: Path, step: int) -> Path:
    """The directory of the checkpoint after a step."""
    return folder / f"iter_{step:07d}"


def name_latest(folder: Path, step: int) -> None:
    """Let the tracker name a checkpoint: `save` calls it on rank 0, once the checkpoint is in its place."""
    new = folder / f"{TRACKER}.new"
    new.write_text(str(step))
    new.replace(folder / TRACKER)


def latest(folder: Path) -> Path | None:
    """The checkpoint that the tracker names; None before the first."""
    tracker = folder / TRACKER
    return place(folder, int(tracker.read_text())) if tracker.exists() else None
