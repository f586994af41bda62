# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A job that is set by hand to what an oracle says, without the package: it must train as one that was loaded."""

from __future__ import annotations

from typing import Any

import torch

from testing.models import Trainable
from tests.soak.optimizer_jobs import parameters
from tests.soak.optimizer_oracle import Slots, Snapshot, components_of


@torch.no_grad()
def put(trainable: Trainable, want: Snapshot) -> None:
    """Set weights, slots, masters and numbers of param groups; all ranks call it."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import gather_and_compute_chunk_metadata

    inner, module = trainable.optimizer.optimizer, trainable.model.module
    optimizers = getattr(inner, "sub_optimizers", [inner])
    owners = {p: each for each in optimizers for group in each.param_groups for p in group["params"]}
    names = {}
    for name, parameter in parameters(trainable):
        names[id(parameter)] = name
        offsets = tuple(gather_and_compute_chunk_metadata(parameter).offsets)
        local = parameter._local_tensor
        tensor_parallel = trainable.recipe.tensor

        def part(
            whole: Slots, name: str = name, offsets: Any = offsets, local: Any = local, tp: int = tensor_parallel
        ) -> torch.Tensor:
            return _own_part(whole, name, offsets, local.shape, tp)

        local.copy_(part(want.weights))
        own = getattr(inner, "param_to_inner_param", {}).get(parameter, parameter)
        if not local.numel() or own not in owners:
            continue
        first = components_of(name)[0]
        slots = {
            slot: part({each: want.slots[each][slot] for each in components_of(name)}) if tensor.dim() else tensor
            for slot, tensor in want.slots.get(first, {}).items()
        }
        master = part(want.masters) if first in want.masters else None
        _put_state(owners[own], own, slots, master)
        if own is not parameter:
            own.copy_(local if master is None else master)
    for group in inner.param_groups:
        numbers = want.numbers[components_of(names[id(group["params"][0])])[0]]
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in numbers.items()})
    module.install_optimized_model_weights()
    module.synchronize_param_gather()
    module.start_param_sync()


def _own_part(whole: Slots, name: str, offsets: tuple[int, ...], shape: Any, tensor_parallel: int) -> torch.Tensor:
    parts = [whole[each] for each in components_of(name)]
    tensor = parts[0]
    if len(parts) > 1:  # gate and up projection lie one after the other in each tensor-parallel rank's part
        cut = zip(*(each.chunk(tensor_parallel) for each in parts), strict=True)
        tensor = torch.cat([half for halves in cut for half in halves])
    return tensor[tuple(slice(o, o + s) for o, s in zip(offsets, shape, strict=True))].clone()


def _put_state(optimizer: Any, own: Any, slots: Slots, master: torch.Tensor | None) -> None:
    optimizer.state.pop(own, None)
    if not slots:
        return
    if hasattr(optimizer, "initialize_state"):
        optimizer.initialize_state(own, False)
        for slot, tensor in (slots | ({} if master is None else {"master_param": master})).items():
            if optimizer.name_to_dtype_map[slot] == torch.float16:
                optimizer.set_scaled_state(own, slot, tensor)
            else:
                optimizer.state[own][slot]._local_tensor.copy_(tensor)
        return
    optimizer.state[own] = {
        slot: _like(own, tensor) if tensor.dim() else tensor.clone() for slot, tensor in slots.items()
    }


def _like(own: Any, tensor: torch.Tensor) -> torch.Tensor:
    made = torch.zeros_like(own, dtype=tensor.dtype)
    getattr(made, "_local_tensor", made).copy_(tensor)
    return made
