# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Is what a checkpoint brings what Megatron itself would have brought?  The harness of the tests by model family.

The oracle is Megatron-Core's own distributed checkpointing: every module's `sharded_state_dict` knows how tensor and
expert parallelism cut its parameters.  One rank writes an unsharded model with it, and any layout reads it into plain
modules: those are the *reference* weights of that layout, by parameter name, as one tensor-parallel rank holds them.
A model under test is wrapped in Megatron-FSDP, and each rank compares its shards with the slices of its reference.

Optimizer state follows the weights elementwise (`SLOTS`), so that the reference tells what it must be, too.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mbridge_fsdp_ckpt.patching import Patches
from testing import models

Weights = dict[str, torch.Tensor]
Correction = Callable[[str, Weights], torch.Tensor | None]

SLOTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp_avg": lambda weight: weight * 3 + 1,
    "exp_avg_sq": lambda weight: weight * weight,
}
STEPS = 7.0
WHOLE = "whole.pt"


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ranks there are, and how they share a model."""

    ranks: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    strategy: str = "optim_grads_params"
    instances: int = 1
    outer: str = "no_shard"

    def on(self, **changes: Any) -> Layout:
        """This layout, changed."""
        return replace(self, **changes)

    def config(self) -> dict[str, Any]:
        """What Megatron's `TransformerConfig` calls these sizes."""
        return {
            "tensor_model_parallel_size": self.tensor,
            "context_parallel_size": self.context,
            "expert_model_parallel_size": self.expert,
            "expert_tensor_parallel_size": self.expert_tensor,
            "sequence_parallel": self.tensor > 1,
        }


@dataclass(slots=True)
class Subject:
    """A model under Megatron-FSDP with its optimizer."""

    model: Any
    optimizer: Any

    @property
    def fsdp(self) -> Any:
        """The `MegatronFSDP` module."""
        return self.model.module


@dataclass(slots=True)
class Comparison:
    """What one rank compared with its reference.

    Args:
        compared: Parameters and buffers, by name.
        trained: Those that the optimizer updates.
        elements: How many elements of parameters this rank holds.
        slots: Parameters whose optimizer state was compared.
        different: What differs, by name; a state's name ends with the slot.
    """

    compared: set[str] = field(default_factory=set)
    trained: set[str] = field(default_factory=set)
    elements: int = 0
    slots: set[str] = field(default_factory=set)
    different: list[str] = field(default_factory=list)


def initialise(layout: Layout, seed: int) -> None:
    """Megatron's groups and random state; a process group exists.  A second call changes the seed alone."""
    models.initialise(
        seed,
        tensor_model_parallel_size=layout.tensor,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        num_distributed_optimizer_instances=layout.instances,
    )


def wrap(module: Any, layout: Layout, **ddp: Any) -> Subject:
    """Wrap a plain module with a config in Megatron-FSDP, and make torch's AdamW for it.

    Args:
        module: The module; it is wrapped, not copied.
        layout: What Megatron's groups were initialised with.
        **ddp: More settings of Megatron's `DistributedDataParallelConfig`.
    """
    model = models.under_fsdp(module, layout.strategy, layout.instances, layout.outer, **ddp)
    return Subject(model, models.adam(model))


def weights_of(module: Any) -> Weights:
    """Copies of a plain module's parameters and persistent buffers, by name without wrappers."""
    state = module.state_dict(keep_vars=True)
    return {_bare(name): tensor.detach().clone() for name, tensor in state.items() if _counts(name, tensor)}


def randomise(module: Any, seed: int) -> None:
    """Give every parameter and buffer random values: of ones and zeros, any part equals any other."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.state_dict(keep_vars=True).items():
            if _counts(name, tensor) and tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))


def write_reference(directory: str | Path, module: Any) -> None:
    """Save a plain, unsharded module with Megatron's distributed checkpointing."""
    from megatron.core import dist_checkpointing

    shutil.rmtree(directory, ignore_errors=True)
    Path(directory).mkdir(parents=True)
    dist_checkpointing.save(_sharded(module), str(directory))
    torch.save(weights_of(module), Path(directory) / WHOLE)


def read_reference(directory: str | Path, module: Any, corrected: Correction | None = None) -> Weights:
    """Load a plain module of this layout with Megatron's distributed checkpointing; its weights.

    Args:
        directory: Where `write_reference` was.
        module: Changed in place.
        corrected: Cuts a parameter by hand that Megatron cuts wrongly.
    """
    from megatron.core import dist_checkpointing

    with _sharded_tensors_know_their_device():
        loaded = dist_checkpointing.load(_sharded(module), str(directory))
    loaded = {_bare(name): value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    whole = torch.load(Path(directory) / WHOLE, weights_only=True) if corrected else {}
    with torch.no_grad():
        for name, tensor in module.state_dict(keep_vars=True).items():
            if _counts(name, tensor):
                value = _take(loaded, _bare(name))
                correction = corrected(_bare(name), whole) if corrected else None
                value = value if correction is None else correction
                assert value is not None, f"Megatron's state has no {name}"
                assert value.shape == tensor.shape, name
                tensor.copy_(value)
    assert not loaded, f"the module has no place for Megatron's {sorted(loaded)}"
    return weights_of(module)


def parameters_of(subject: Subject) -> Iterator[tuple[str, Any]]:
    """The parameters that the optimizer updates, and persistent buffers, by name without wrappers."""
    state = subject.fsdp.state_dict(keep_vars=True)  # a hook puts the distributed parameters in place
    for name, tensor in state.items():
        if _counts(name, tensor):
            yield _bare(name), tensor


def fill_slots(subject: Subject) -> int:
    """Give every parameter with elements here an optimizer state that follows its weight; how many there are.

    Parameters without elements here get none: torch's Adam sees no gradient for them.
    """
    filled = 0
    for state, parameters in _optimized(subject):
        for parameter in parameters:
            weight = local(parameter)
            if weight.numel() == 0:
                continue
            state[parameter] = {"step": torch.tensor(STEPS)}
            for slot, follow in SLOTS.items():
                state[parameter][slot] = torch.zeros_like(parameter)
                local(state[parameter][slot]).copy_(follow(weight))
            filled += 1
    return filled


def compare(subject: Subject, reference: Mapping[str, torch.Tensor]) -> Comparison:
    """Compare everything this rank holds, bit for bit; what no rank may lack is checked at once.

    A parameter is compared with its slice of the reference, its optimizer state with what follows from that.
    """
    found = Comparison()
    states: dict[int, Any] = {}
    for state, parameters in _optimized(subject):
        states |= {id(parameter): state.get(parameter, {}) for parameter in parameters}
    for name, tensor in parameters_of(subject):
        expected = _slice_of(reference[name], tensor)
        weight = local(tensor).reshape(-1)
        found.compared.add(name)
        if not torch.equal(weight, expected.to(weight.dtype)):
            found.different.append(name)
        if not isinstance(tensor, torch.nn.Parameter):
            continue
        found.elements += weight.numel()
        if id(tensor) not in states:
            continue
        found.trained.add(name)
        if weight.numel():
            found.slots.add(name)
            found.different += [f"{name} {slot}" for slot in _different_slots(states[id(tensor)], expected.float())]
    absent = reference.keys() ^ found.compared
    assert not absent, f"the model and its reference differ in {sorted(absent)}"
    return found


def local(tensor: Any) -> torch.Tensor:
    """The local tensor of a DTensor, or the tensor itself; shares memory."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor).detach()
    return found


def _different_slots(state: Mapping[str, Any], weight: torch.Tensor) -> Iterator[str]:
    if float(state.get("step", 0.0)) != STEPS:
        yield "step"
    for slot, follow in SLOTS.items():
        if slot not in state or not torch.equal(local(state[slot]).reshape(-1), follow(weight)):
            yield slot


def _slice_of(reference: torch.Tensor, tensor: Any) -> torch.Tensor:
    """What this rank's shard must be; whole without sharding, as are buffers."""
    flat = reference.reshape(-1)
    part = getattr(tensor, "megatron_fsdp_slice", None)
    return flat if part is None else flat[part.start : max(part.start, part.stop)]


def _optimized(subject: Subject) -> Iterator[tuple[Any, list[Any]]]:
    """The state and the parameters of every torch optimizer inside Megatron's."""
    for one in getattr(subject.optimizer, "chained_optimizers", [subject.optimizer]):
        inner = one.optimizer
        if inner is not None:
            yield inner.state, [parameter for group in inner.param_groups for parameter in group["params"]]


def _sharded(module: Any) -> dict[str, Any]:
    """Megatron's description of the module's state; layers may differ from one another."""
    state = module.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    return {name: value for name, value in state.items() if "_extra_state" not in name}


def _take(loaded: Weights, name: str) -> torch.Tensor | None:
    """A loaded tensor, taken out, or None; `FusedMLASelfAttention` describes its down projections one by one."""
    if name in loaded or "linear_qkv_down_proj.weight" not in name:
        return loaded.pop(name, None)
    return torch.cat([loaded.pop(name.replace("_qkv_", middle)) for middle in ("_q_", "_kv_")])


@contextmanager
def _sharded_tensors_know_their_device() -> Iterator[None]:
    """torch answers `ShardedTensor.device` from a table in which the CPU ranks' replaced property is not found."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    def device(self: Any) -> torch.device:
        found: torch.device = self._local_shards[0].tensor.device
        return found

    patches = Patches()
    patches.set(ShardedTensor, "device", property(device))
    try:
        yield
    finally:
        patches.undo()


def _counts(name: str, tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and "_extra_state" not in name


def _bare(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
