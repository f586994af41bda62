# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a checkpoint must hold, found without the code under test.

Global tensors are assembled from all ranks' shards at the offsets that Megatron-FSDP itself gathers, one parameter
after another (`gather_and_compute_chunk_metadata`), and fused parameters are taken apart by rules written down here
again.  What is on disk is read by torch's own Distributed Checkpoint.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from mbridge_fsdp_ckpt.live.tensors import local_shard
from testing.models import Trainable

Block = tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]
"""Shape of a whole tensor, offsets of a rank's block of it, that block."""

Digests = dict[str, tuple[str, tuple[int, ...], str]]

IN_PROJ = {"query": 32, "key": 32, "value": 64, "z": 64, "beta": 8, "alpha": 8}
CONV = {"query": 32, "key": 32, "value": 64}


def digest(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str]:
    """Dtype, shape and a hash of the bits."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(raw).hexdigest()


def on_disk(directory: str | Path) -> Digests:
    """Every model and optimizer tensor of a checkpoint, as digests."""
    return {key: digest(tensor) for key, tensor in tensors_on_disk(directory).items()}


def tensors_on_disk(directory: str | Path) -> dict[str, torch.Tensor]:
    """Every model and optimizer tensor of a checkpoint, read whole by torch's own reader."""
    reader = FileSystemReader(str(directory))
    metadata = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata) and key.startswith(("model.", "optimizer.state."))
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_load(state, storage_reader=reader, no_dist=True)
    return state


def live(trainable: Trainable) -> Digests:
    """Every model and optimizer tensor, assembled over all ranks; the same on every rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, list(_own_blocks(trainable)))
    blocks: dict[str, list[Any]] = {}
    for rank_blocks in gathered:
        for key, *block in rank_blocks:
            blocks.setdefault(key, []).append(block)
    found: Digests = {}
    for key, parts in blocks.items():
        for name, tensor in _unfused(key, assembled(parts), trainable.recipe.tensor):
            found[name] = digest(tensor)
    return found


def _own_blocks(trainable: Trainable) -> Any:
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import gather_and_compute_chunk_metadata

    module = trainable.model.module
    state_dict = module.state_dict(keep_vars=True)  # puts the distributed parameters in place
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for key, tensor in state_dict.items():
        if not isinstance(tensor, torch.nn.Parameter):
            continue
        offsets = tuple(gather_and_compute_chunk_metadata(tensor).offsets)
        yield f"model.{_numbered(key, trainable)}", *_block(tensor, offsets, local_shard(tensor))
        state = _state_of(trainable, tensor)
        name = _numbered(f"module.{names[id(tensor)]}", trainable)
        for slot, value in state.items():
            local = getattr(value, "_local_tensor", value)
            if slot != "master_param" and local.dim() > 0:
                yield f"optimizer.state.{name}|{slot}", *_block(tensor, offsets, local)


def _block(parameter: Any, offsets: tuple[int, ...], local: torch.Tensor) -> Block:
    return tuple(parameter.shape), offsets, local.detach().clone().reshape(parameter._local_tensor.shape)


def _state_of(trainable: Trainable, parameter: Any) -> dict[str, Any]:
    inner = trainable.optimizer.optimizer
    return dict(inner.state.get(parameter, {}))


def assembled(parts: list[Block]) -> torch.Tensor:
    """A whole tensor of its ranks' blocks."""
    shape, _, first = parts[0]
    whole = torch.empty(shape, dtype=first.dtype)
    written = torch.zeros(shape, dtype=torch.bool)
    for part_shape, offsets, local in parts:
        assert part_shape == shape
        if local.numel():
            index = tuple(slice(o, o + s) for o, s in zip(offsets, local.shape, strict=True))
            whole[index], written[index] = local, True
    assert bool(written.all()), "some rows are on no rank"
    return whole


def _numbered(name: str, trainable: Trainable) -> str:
    from megatron.core import parallel_state

    recipe = trainable.recipe
    first = parallel_state.get_expert_model_parallel_rank() * (recipe.experts // recipe.expert) if recipe.experts else 0
    name = re.sub(r"\b(_orig_mod|_checkpoint_wrapped_module)\.", "", name)
    return re.sub(r"local_experts\.(\d+)", lambda m: f"local_experts.{int(m[1]) + first}", name)


def _unfused(key: str, tensor: torch.Tensor, tensor_parallel: int) -> Any:
    name, bar, slot = key.partition("|")
    ending = f".{slot}" if bar else ""
    if re.search(r"linear_fc1\.(weight|bias)$", name):
        count = 1 if ".experts." in name else tensor_parallel  # experts: expert tensor parallel size 1
        halves = [block.chunk(2) for block in tensor.chunk(count)]
        yield f"{name}_w{ending}", torch.cat([gate for gate, _ in halves])
        yield f"{name}_v{ending}", torch.cat([up for _, up in halves])
        return
    sizes = IN_PROJ if ".in_proj." in name else CONV if ".conv1d." in name else None
    if sizes is None:
        yield f"{name}{ending}", tensor
        return
    rows = [n // tensor_parallel for n in sizes.values()]
    blocks = [torch.split(block, rows) for block in tensor.chunk(tensor_parallel)]
    for position, component in enumerate(sizes):
        yield f"{name}.{component}{ending}", torch.cat([block[position] for block in blocks])
