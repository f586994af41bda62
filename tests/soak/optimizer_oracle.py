# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a load must leave, written apart from the package: whole tensors, whatever the layout.

Tensors are assembled from all ranks' shards at the offsets that Megatron-FSDP gathers, and the fused parameter is taken
apart by a rule written down here again.  What nobody holds is NaN.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from testing.models import Trainable
from tests.soak.optimizer_cases import FUSED_WEIGHT, Case
from tests.soak.optimizer_jobs import parameters

Slots = dict[str, torch.Tensor]

_NO_NUMBERS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Of a param group: what says which parameters it has, and how to compute."""

_CONSTRUCTION = frozenset(
    {"offload_fraction", "cpu_optimizer_cls", "gpu_optimizer_cls", "param_update_in_fp32", "pin_cpu_grads"}
    | {"pin_cpu_params", "overlap_cpu_optimizer_d2h_h2d"}
)


@dataclass(slots=True)
class Snapshot:
    """What is live in all ranks, but for `numbers`, `names` and `rng`, which are this rank's.

    Args:
        weights: Whole main weights, by name.
        slots: Of each parameter, by name; numbers have no dimensions.
        masters: fp32 copies of weights that an optimizer keeps.
        numbers: Of each parameter, those of its param group.
        names: The parameters' names that each group has, if any.
        rng: A hash of the states of generators.
        scaler: What finds the loss scale, if anything does.
        optional: Parameters whose state, masters included, may be absent.
    """

    weights: Slots = field(default_factory=dict)
    slots: dict[str, Slots] = field(default_factory=dict)
    masters: Slots = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    names: list[Any] = field(default_factory=list)
    rng: str = ""
    scaler: dict[str, Any] | None = None
    optional: set[str] = field(default_factory=set)


def seen(trainable: Trainable) -> Snapshot:
    """The job as it is; all ranks call it."""
    found, own = Snapshot(rng=_rng(), scaler=_scaler(trainable)), list(_own_blocks(trainable))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    parts: dict[tuple[str, str], list[Any]] = {}
    for name, what, *block in (each for blocks in gathered for each in blocks):
        parts.setdefault((name, what), []).append(block)
    for (name, what), blocks in parts.items():
        for component, tensor in _taken_apart(name, _assembled(blocks), trainable.recipe.tensor):
            if what == "weight":
                found.weights[component] = tensor
            elif what == "master":
                found.masters[component] = tensor
            else:
                found.slots.setdefault(component, {})[what] = tensor
    groups = trainable.optimizer.optimizer.param_groups
    names = {id(parameter): name for name, parameter in parameters(trainable)}
    for group in groups:
        numbers = {name: _copied(value) for name, value in group.items() if name not in _NO_NUMBERS | _CONSTRUCTION}
        for parameter in group["params"]:
            for component in components_of(names[id(parameter)]):
                found.numbers[component] = numbers
    found.names = [group.get("param_names") for group in groups]
    return found


def _own_blocks(trainable: Trainable) -> Iterator[tuple[Any, ...]]:
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import gather_and_compute_chunk_metadata

    for name, parameter in parameters(trainable):
        offsets = tuple(gather_and_compute_chunk_metadata(parameter).offsets)
        local = parameter._local_tensor.detach()
        where = tuple(parameter.shape), offsets
        yield name, "weight", *where, local.clone()
        if not local.numel():
            continue
        master, state = _state_of(trainable.optimizer.optimizer, parameter)
        if master is not None:
            yield name, "master", *where, master.detach().clone().reshape(local.shape)
        for slot, value in state.items():
            tensor = getattr(value, "_local_tensor", value)
            if not isinstance(tensor, torch.Tensor):
                yield name, slot, (), (), torch.tensor(tensor)
            elif tensor.dim() == 0:
                yield name, slot, (), (), tensor.clone()
            else:
                yield name, slot, *where, tensor.detach().clone().reshape(local.shape)


def _state_of(inner: Any, parameter: Any) -> tuple[torch.Tensor | None, dict[str, Any]]:
    """The optimizer's fp32 copy of a weight, and the other slots, as values without a scale."""
    of_parameter, own = getattr(inner, "param_to_inner_param", {}), parameter
    master: Any = None
    if parameter in of_parameter:
        own = of_parameter[parameter]
        master = own if own.data_ptr() != parameter._local_tensor.data_ptr() else None
    state: dict[str, Any] = {}
    for optimizer in getattr(inner, "sub_optimizers", [inner]):
        state |= {name: value for name, value in optimizer.state.get(own, {}).items() if value is not None}
    kept = state.pop("master_param", None)
    scales = getattr(inner, "_scales", {}).get(parameter, {})
    for slot, scale in scales.items():
        if slot in state and state[slot].dtype == torch.float16:
            state[slot] = getattr(state[slot], "_local_tensor", state[slot]).float() * scale
    return (master if own is not parameter else getattr(kept, "_local_tensor", kept)), state


def _assembled(blocks: list[Any]) -> torch.Tensor:
    """A whole tensor; NaN where ranks that hold the same have other values, or where nobody holds anything."""
    shape, _, first = blocks[0]
    if not shape:
        same = all(torch.equal(block[2], first) for block in blocks)
        return first if same else torch.tensor(float("nan"))
    whole = torch.full(shape, float("nan"), dtype=first.dtype)
    written = torch.zeros(shape, dtype=torch.bool)
    for _, offsets, local in blocks:
        if local.numel():
            at = tuple(slice(o, o + s) for o, s in zip(offsets, local.shape, strict=True))
            differs = written[at] & (whole[at] != local)
            whole[at], written[at] = torch.where(differs, float("nan"), local), True
    return whole


def components_of(name: str) -> list[str]:
    """What a parameter is stored as."""
    return [f"{name}_w", f"{name}_v"] if name.endswith("linear_fc1.weight") else [name]


def _taken_apart(name: str, tensor: torch.Tensor, tensor_parallel: int) -> list[tuple[str, torch.Tensor]]:
    """Gate and up projection lie one after the other in each tensor-parallel rank's part."""
    names = components_of(name)
    if len(names) == 1 or not tensor.dim():
        return [(each, tensor) for each in names]
    halves = [part.chunk(2) for part in tensor.chunk(tensor_parallel)]
    return [(each, torch.cat([half[place] for half in halves])) for place, each in enumerate(names)]


def _rng() -> str:
    states = torch.get_rng_state().numpy().tobytes(), repr(random.getstate()).encode()
    return hashlib.sha256(b"".join(states)).hexdigest()


def _scaler(trainable: Trainable) -> dict[str, Any] | None:
    scaler = trainable.optimizer.grad_scaler
    return None if scaler is None else {name: _copied(value) for name, value in scaler.state_dict().items()}


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return list(value) if isinstance(value, tuple) else value


def missing(case: Case, name: str, slot: str) -> bool:
    """Whether the checkpoint lacks a slot of a component."""
    first = next(iter(case.kinds[0].slots))
    if case.how.lacks == "state":
        return name in components_of(FUSED_WEIGHT)
    return case.how.lacks != "" and (name, slot) == (lacking(case), first)


def lacking(case: Case) -> str:
    """The component of which the checkpoint lacks a slot."""
    return components_of(FUSED_WEIGHT)[case.how.lacks == "other slot"]


def included(key: str) -> bool:
    """What is loaded of half of the layers, by any name."""
    return ".layers.0." in key


def expected(case: Case, saved: Snapshot, before: Snapshot) -> Snapshot:
    """What is live after a load of all that fits."""
    how, live = case.how, case.kinds[1]
    want = Snapshot(rng=before.rng, names=before.names, scaler=saved.scaler if how.load != "weights" else before.scaler)
    for name, weight in before.weights.items():
        filled = not how.half or included(name)
        takes_weight, takes_state = filled and how.load != "optimizer", filled and how.load != "weights"
        want.weights[name] = _over(saved.weights[name], weight) if takes_weight else weight
        if name not in before.numbers:
            continue  # frozen
        state = _slots(case, name, saved, weight) if takes_state else before.slots.get(name, {})
        if state:
            want.slots[name] = state
        elif takes_state and live.counts == "group":
            want.optional.add(name)  # its masters are state, too
        if takes_state and (name not in saved.numbers or (how.lacks == "state" and missing(case, name, ""))):
            want.optional.add(name)
        if (live.master and state) or name in before.masters:
            want.masters[name] = _master(case, name, saved, before, want.weights[name], takes_weight, takes_state)
        want.numbers[name] = _numbers(case, name, saved, before)
    return want


def _over(saved: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Rows of one tensor, and where it has none, the rows of another; in that one's dtype."""
    whole, rows = rest.clone(), min(len(saved), len(rest))
    whole[:rows] = saved[:rows].to(rest.dtype)
    return whole


def _slots(case: Case, name: str, saved: Snapshot, weight: torch.Tensor) -> Slots:
    """As the live optimizer keeps them: zero where the checkpoint has none and need not have any."""
    kept, live = saved.slots.get(name), case.kinds[1]
    if name in saved.numbers and not kept:
        return {}
    dtypes, slots = live.slots, dict[str, torch.Tensor]()
    for slot, dtype in dtypes.items():
        zero = torch.zeros_like(weight, dtype=torch.float32 if dtype == torch.float16 else dtype)
        has = kept is not None and slot in kept and not missing(case, name, slot)
        slots[slot] = _over(kept[slot], zero) if has and kept is not None else zero
    if live.counts == "state":
        counted = saved.numbers.get(name, {}).get("step")
        has = kept is not None and "step" in kept and not missing(case, name, "step")
        step = kept["step"] if has and kept is not None else torch.tensor(float(counted or 0.0))
        slots["step"] = step
    return slots


def _master(
    case: Case,
    name: str,
    saved: Snapshot,
    before: Snapshot,
    weight: torch.Tensor,
    takes_weight: bool,
    takes_state: bool,
) -> torch.Tensor:
    copy = weight.float()
    if not takes_weight and not takes_state:
        return before.masters[name]
    if takes_state and case.kinds[0].master and name in saved.masters and saved.slots.get(name):
        return copy if missing(case, name, "master_param") else _over(saved.masters[name], copy)
    return copy


def _numbers(case: Case, name: str, saved: Snapshot, before: Snapshot) -> dict[str, Any]:
    """All that the same optimizer saved; of another, what both have.

    Whose numbers a group has of which only a part is loaded nobody says, but for a counter, which is the state's.
    """
    own, found = saved.numbers.get(name, {}), dict(before.numbers[name])
    if case.how.load == "weights":
        return found
    if case.kinds[1].counts == "group" and "step" in saved.slots.get(name, {}):
        own = {**own, "step": int(saved.slots[name]["step"])}
    if case.how.half or not own:
        return {key: value for key, value in own.items() if key == "step"}
    if case.kinds[1].counts == "group":
        found["step"] = 0  # unless the checkpoint has another
    if case.saved == case.live:
        return found | own
    in_group = {"step"} if case.kinds[1].counts == "group" else set()
    return found | {key: value for key, value in own.items() if key in found or key in in_group}
