# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""How much memory a load takes: what torch operators allocate and is still alive, operator by operator."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.errors import UnsupportedStateError
from mbridge_fsdp_ckpt.live.optimizer.adapters import adapters_for
from mbridge_fsdp_ckpt.live.optimizer.base import SlotSpec
from mbridge_fsdp_ckpt.live.optimizer.fused_adam import FusedAdamAdapter
from mbridge_fsdp_ckpt.live.tensors import local_shard
from testing.kernels import replace_cuda_only_kernels
from testing.models import Recipe
from testing.ranks import no_process_group
from tests.core import cases


class CountedMemory(TorchDispatchMode):
    """Bytes of new storages, at the most at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.peak = 0
        self._known: set[int] = set()
        self._new: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = self._storages((args, kwargs))
        result = function(*args, **(kwargs or {}))
        self._new = [(storage, size) for storage, size in self._new if not storage.expired()]
        known = {storage.cdata for storage, _ in self._new} | given.keys()
        self._new += [(StorageWeakRef(s), s.nbytes()) for key, s in self._storages(result).items() if key not in known]
        self.peak = max(self.peak, sum(size for _, size in self._new))
        return result

    @staticmethod
    def _storages(values: Any) -> dict[int, Any]:
        tensors = (local_shard(leaf) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
        return {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}


def load(directory: str, recipe: Recipe) -> dict[str, int]:
    """Peak of new memory while a fresh optimizer's state is loaded, and the bytes of that state."""
    trainable = cases.prepared(recipe, seed=999)
    settings = mbridge_fsdp_ckpt.Settings(verify="header")
    with CountedMemory() as memory:
        mbridge_fsdp_ckpt.load(directory, model=trainable.model, optimizer=trainable.optimizer, settings=settings)
    adapters = adapters_for(trainable.optimizer)
    slots = [a.slots(p) for a in adapters for group in a.groups() for p in group.parameters]
    return {"peak": memory.peak, "state": sum(slot.tensor.nbytes for each in slots for slot in each.values())}


def _fused(weight: torch.Tensor, **settings: Any) -> Any:
    from transformer_engine.pytorch.optimizers import FusedAdam

    replace_cuda_only_kernels()
    optimizer = FusedAdam([weight], **settings)
    optimizer.initialize_state(weight, False)
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.set_scaled_state(weight, name, torch.rand(weight.shape))
    return optimizer


@no_process_group
def state_waits_for_its_installation() -> None:
    """New state, of moments that have a scale, is made and filled beside the state that the optimizer has."""
    weight = torch.nn.Parameter(torch.zeros(4, 3))
    moments = {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16}
    saved = FusedAdamAdapter(_fused(weight, **moments)).slots(weight)
    optimizer = _fused(weight, **moments)
    adapter = FusedAdamAdapter(optimizer)
    before, scales = dict(optimizer.state[weight]), dict(optimizer._scales[weight])
    values = {name: state.clone() for name, state in before.items()}
    slots = adapter.allocate(weight, {name: SlotSpec("sharded", torch.float32) for name in saved})
    for name, slot in slots.items():
        slot.tensor.copy_(saved[name].tensor)
    assert all(optimizer.state[weight][name] is before[name] for name in before)
    assert all(optimizer._scales[weight][name] is scales[name] for name in scales)
    assert all(torch.equal(before[name], values[name]) for name in before)
    adapter.install(weight, slots, 3.0)
    for name, slot in adapter.slots(weight).items():
        assert optimizer.state[weight][name].dtype == torch.float16
        torch.testing.assert_close(slot.tensor, saved[name].tensor, rtol=1e-3, atol=0.0)


@no_process_group
def foreign_slots() -> list[str]:
    """What an optimizer says to slots that it does not keep; its state stays."""
    weight = torch.nn.Parameter(torch.zeros(4, 3))
    optimizer = _fused(weight)
    before, found = dict(optimizer.state[weight]), []
    for specs in (
        {"max_exp_avg_sq": SlotSpec("sharded", torch.float32)},
        {"exp_avg": SlotSpec("sharded", torch.int16)},
        {"exp_avg": SlotSpec("tensor", torch.float32)},
    ):
        try:
            FusedAdamAdapter(optimizer).allocate(weight, specs)
        except UnsupportedStateError as error:
            found.append(str(error))
        assert all(optimizer.state[weight][name] is before[name] for name in before)
    return found
