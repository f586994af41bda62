# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Loads of other libraries that have to reshard: DTensors of the keys of our checkpoint of another layout.

They were saved as that layout's tensor parallelism splits them, and are loaded as FSDP2 splits them: every tensor along
its first dimension.  Where both are the same, as of half of all matrices on two ranks, a rank reads what it has written
itself, and nothing is resharded: Megatron-FSDP lays parameters end to end, which these libraries' loads don't know.
What they bring is compared with what was saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, ones

from benchmarks import peers
from benchmarks.layouts import LAYOUT, digest, elsewhere, require_same
from mbridge_fsdp_ckpt.opening import open_checkpoint
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One of them.

    Args:
        shape: Its global shape.
        dtype: Of its elements.
        dimension: Along which tensor parallelism splits it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dimension: int

    def whole(self, seed: int) -> torch.Tensor:
        """What is saved of it, on every rank."""
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(self.shape, generator=generator).to(self.dtype)


class Resharded:
    """Both libraries' checkpoints of them, made when it is, and what a load is to bring.

    Args:
        folder: Where our checkpoint of the other layout is, and where theirs go.
    """

    def __init__(self, folder: Path) -> None:
        self._tensors = dict(_tensors_of(elsewhere(folder)))
        world, parallel = dist.get_world_size(), LAYOUT["tensor"]
        self._mesh = init_device_mesh("cpu", (world,))
        self._places = {"DCP": folder / "elsewhere, DCP", "torch_checkpointing": folder / "elsewhere, theirs"}
        saved_on = init_device_mesh("cpu", (world // parallel, parallel))
        saved: dict[str, DTensor] = {}
        self._expected: dict[str, str] = {}
        for seed, (key, tensor) in enumerate(self._tensors.items()):
            whole = tensor.whole(seed)
            saved[key] = _part(whole, saved_on, (0, tensor.dimension))
            self._expected[key] = digest(_part(whole, self._mesh, (0,)).to_local())
        dcp.save(saved, storage_writer=dcp.FileSystemWriter(self._places["DCP"], sync_files=True))
        self._manager = peers.TorchCheckpointing(background=False, reshards=True) if peers.IS_INSTALLED else None
        if self._manager is not None:
            self._manager.save(self._places["torch_checkpointing"], saved)

    def place(self, library: str) -> Path:
        """A library's checkpoint."""
        return self._places[library]

    def targets(self) -> dict[str, DTensor]:
        """What to load into, in memory that is in use."""
        return {
            key: ones(tensor.shape, dtype=tensor.dtype, device_mesh=self._mesh, placements=[Shard(0)])
            for key, tensor in self._tensors.items()
        }

    def load(self, library: str, targets: Mapping[str, DTensor]) -> None:
        """Load a library's checkpoint."""
        if library == "DCP":
            dcp.load(dict(targets), storage_reader=dcp.FileSystemReader(self._places[library]))
        elif self._manager is not None:
            self._manager.load(self._places[library], targets)

    def check(self, targets: Mapping[str, DTensor]) -> None:
        """Compare what a load has brought.

        Raises:
            RuntimeError: Of some it brought something else.
        """
        require_same({key: digest(tensor.to_local()) for key, tensor in targets.items()}, self._expected)

    def close(self) -> None:
        """Let what has been started end."""
        if self._manager is not None:
            self._manager.close()


def _tensors_of(checkpoint: Path) -> Iterator[tuple[str, _Tensor]]:
    """The sharded keys of a checkpoint of ours."""
    source = open_checkpoint(checkpoint)
    shapes = {key: entry.shape for key, entry in source.metadata.keys.items() if entry.is_sharded}
    for key, chunks in source.chunks(shapes).items():
        shape = shapes[key]
        across = [dim for dim in range(1, len(shape)) if any(chunk.box.size[dim] < shape[dim] for chunk in chunks)]
        yield key, _Tensor(shape, dtype_from_name(source.metadata.keys[key].dtype), max(across, default=0))


def _part(whole: torch.Tensor, mesh: DeviceMesh, dimensions: Sequence[int]) -> DTensor:
    """This rank's shard of a tensor that every rank has, in memory of its own: a dimension for each of the mesh."""
    placements = [Shard(dimension) for dimension in dimensions]
    local = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local().clone()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
