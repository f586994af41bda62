# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of wrappers around modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.eval_frame import DisableContext, OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.errors import CheckpointError
from testing.models import Recipe
from tests.core import cases, failures, oracle

MIXED = Recipe(layers=3, experts=4, gated_delta_net=True)
"""Two layers of Gated DeltaNet, one of attention; experts in all."""

Wrap = Callable[[Any], Any]


class Unknown(torch.nn.Module):
    """A wrapper of one's own."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner


def compiled(module: Any) -> Any:
    """What `torch.compile` returns; nothing is compiled, it computes as it is."""
    return OptimizedModule(module, DisableContext())


def checkpointed(module: Any) -> Any:
    """A module whose activations are computed again."""
    return checkpoint_wrapper(module)


def wrap_all(model: Any) -> None:
    """Each kind of wrapper, and one in the other, at every level."""
    _wrap(model, "0.self_attention.in_proj", compiled)
    _wrap(model, "0.self_attention.conv1d", checkpointed)
    _wrap(model, "0.mlp.experts.local_experts.0.linear_fc1", compiled)
    _wrap(model, "0.mlp.experts.local_experts.1", checkpointed, compiled)
    _wrap(model, "0.mlp.experts.local_experts", checkpointed)
    _wrap(model, "0.mlp.experts", checkpointed)
    _wrap(model, "1.mlp.shared_experts", compiled, checkpointed)
    _wrap(model, "1", checkpointed, compiled)
    _wrap(model, "2.mlp.experts.local_experts.1.linear_fc1", checkpointed)
    _wrap(model, "2.mlp.experts", compiled)


def wrap_in_unknown(model: Any) -> None:
    """A fused layer below a module that nobody knows."""
    _wrap(model, "0.self_attention.in_proj", Unknown, compiled)


def save_under_second_version(directory: str) -> dict[str, Any]:
    """What saving a model under Megatron-FSDP v2 raises."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental import Flat, Placements, fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).cuda()
    mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (torch.distributed.get_world_size(),))
    fully_shard(model, mesh, Placements(dp_axes=[0], parameter=[Flat()], gradient=[Flat()], optimizer=[Flat()]))
    try:
        mbridge_fsdp_ckpt.save(directory, model=model)
    except CheckpointError as error:
        return {"error": type(error).__name__, "text": str(error), "unchanged": True}
    raise AssertionError("saved")


def _wrap(model: Any, path: str, *wraps: Wrap) -> None:
    """Put wrappers around a module below the decoder's layers, the first one innermost."""
    holder = next(module for name, module in model.named_modules() if name.endswith("decoder.layers"))
    *above, leaf = path.split(".")
    for name in above:
        holder = getattr(holder, name)
    module = getattr(holder, leaf)
    for wrap in wraps:
        module = wrap(module)
    setattr(holder, leaf, module)


def train_and_save(directory: str, recipe: Recipe, change: Callable[[Any], None] | None) -> dict[str, Any]:
    """Two steps, and a save; what was live."""
    trainable = cases.prepared(recipe, steps=2, change=change)
    mbridge_fsdp_ckpt.save(directory, model=trainable.model, optimizer=trainable.optimizer)
    return oracle.live(trainable)


def load_and_save(directory: str, again: str, recipe: Recipe, change: Callable[[Any], None] | None) -> dict[str, Any]:
    """Load into a model initialised otherwise, and save again; what is live, and the next loss."""
    trainable = cases.prepared(recipe, seed=999, change=change)
    mbridge_fsdp_ckpt.load(directory, model=trainable.model, optimizer=trainable.optimizer)
    found = oracle.live(trainable)
    mbridge_fsdp_ckpt.save(again, model=compiled(trainable.model), optimizer=trainable.optimizer)
    return found


def save_hidden(directory: str) -> dict[str, Any]:
    """The error of a save of a fused layer that nobody can see."""
    trainable = cases.prepared(MIXED.on(layers=1, experts=0, tensor=2), change=wrap_in_unknown)
    return failures.seen(trainable, lambda: mbridge_fsdp_ckpt.save(directory, model=trainable.model))
