"""Reading a checkpoint's bytes: first into memory that nobody uses, then into live tensors."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mbridge_fsdp_ckpt.agree.agreement import Agreement
from mbridge_fsdp_ckpt.errors import InternalError
from mbridge_fsdp_ckpt.live.holdings import OptimizerPart
from mbridge_fsdp_ckpt.live.megatron_fsdp import local_shard, storage_of
from mbridge_fsdp_ckpt.live.optimizer.base import STEP, Hyperparameters, Slot, SlotSpec
from mbridge_fsdp_ckpt.loading.destinations import Destination, block, refuse_copy, scalar
from mbridge_fsdp_ckpt.loading.match import in_file_order
from mbridge_fsdp_ckpt.loading.opened import Opened
from mbridge_fsdp_ckpt.plan.boxes import whole
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name
from mbridge_fsdp_ckpt.plan.pieces import Component, ParameterPlan
from mbridge_fsdp_ckpt.storage.ranges import Scratch
from mbridge_fsdp_ckpt.storage.source import StoredChunk

Targets = dict[str, list[Destination]]
"""For each key, the blocks that are wanted of it."""


@dataclass(frozen=True, slots=True)
class Staged:
    """Verified bytes that nobody uses yet: filled slots that are not in place, and kept chunks of weights."""

    opened: Opened
    weights: Targets
    allocated: list[_Allocated]
    kept: dict[StoredChunk, torch.Tensor]
    scratch: Scratch

    def take(self, chunk: StoredChunk) -> torch.Tensor:
        """A chunk's elements: those that were kept when it was verified, or read again."""
        kept = self.kept.pop(chunk, None)
        return self.read(chunk) if kept is None else kept

    def read(self, chunk: StoredChunk) -> torch.Tensor:
        """A chunk's elements, until the next one is read."""
        return self.opened.source.read(chunk, verify=self.opened.verified, scratch=self.scratch)


def stage(opened: Opened, budget: int, agreement: Agreement) -> Staged:
    """Read and verify what this rank needs, and change nothing.

    Optimizer state goes straight into new slots.  Of the weights, whose memory is live, the first `budget` bytes are
    kept; without verification they are not read here.

    Raises:
        CheckpointError, OSError: Bytes are damaged, or cannot be read.
    """
    weights: Targets = defaultdict(list)
    held = {storage_of(buffer) for buffer in opened.module.buffers()}
    for item in opened.planned:
        if item.parameter.is_buffer:
            refuse_copy(item.tensor, held, item.plan.layout.key)
        _add_targets(weights, item.plan, item.plan.model_key, local_shard(item.tensor), opened.asked)
    slots: Targets = defaultdict(list)
    allocated = [item for part in opened.parts for item in _allocate(opened, part, slots)] if opened.with_state else []
    staged = Staged(opened, weights, allocated, {}, Scratch(agreement.beat))
    filling = _Filling(opened, slots)
    for chunk in in_file_order(opened.chunks, opened.needed):
        if chunk.key not in weights:
            filling.copy(chunk, staged.read(chunk))
        elif opened.verified and chunk.record.length <= budget:
            budget -= chunk.record.length
            staged.kept[chunk] = opened.source.read(chunk)
        elif opened.verified:
            opened.source.verify(chunk, staged.scratch)
        agreement.beat()
    filling.finish()
    return staged


def fill(staged: Staged, agreement: Agreement) -> None:
    """Copy verified bytes into live weights, and put optimizer state in place.

    Raises:
        CheckpointError, OSError: The storage failed since it was verified.
    """
    opened = staged.opened
    filling = _Filling(opened, staged.weights)
    needed = {key: boxes for key, boxes in opened.needed.items() if key in staged.weights}
    for chunk in in_file_order(opened.chunks, needed):
        filling.copy(chunk, staged.take(chunk))
        agreement.beat()
    filling.finish()
    with torch.no_grad():
        _install(opened, staged.allocated)
    for restoration in opened.scaling:
        restoration.apply()


@dataclass(frozen=True, slots=True)
class _Allocated:
    part: OptimizerPart
    parameter: torch.Tensor
    plan: ParameterPlan
    slots: dict[str, Slot]
    step: torch.Tensor | None


def _allocate(opened: Opened, part: OptimizerPart, targets: Targets) -> Iterator[_Allocated]:
    for parameter, plan in part.parameters():
        if not plan.pieces:
            yield _Allocated(part, parameter, plan, {}, None)
            continue
        held = plan.pieces[0].component
        entries = opened.slots.get(plan.state_name(held), {})
        specs = {slot: SlotSpec(entry.kind, dtype_from_name(entry.dtype)) for slot, entry in entries.items()}
        slots = part.adapter.allocate(parameter, specs)
        for name, slot in slots.items():
            if slot.kind == "sharded":
                _add_targets(targets, plan, partial(plan.slot_key, slot=name), slot.tensor, opened.asked)
            else:
                targets[plan.slot_key(held, name)].append(scalar(slot.tensor))
        step = None
        if STEP in specs:
            step = torch.zeros((), dtype=torch.float64)
            targets[plan.slot_key(held, STEP)].append(scalar(step))
        yield _Allocated(part, parameter, plan, slots, step)


def _add_targets(
    targets: Targets,
    plan: ParameterPlan,
    key_of: Callable[[Component], str],
    live: torch.Tensor,
    asked: set[str],
) -> None:
    for piece in plan.pieces:
        key = key_of(piece.component)
        if key in asked:
            targets[key].append(block(piece, live, key))


class _Filling:
    """Copies chunks to where they are wanted, and counts."""

    def __init__(self, opened: Opened, targets: Targets) -> None:
        self._opened, self._targets = opened, targets
        self._filled: Counter[tuple[str, int]] = Counter()

    def copy(self, chunk: StoredChunk, data: torch.Tensor) -> None:
        """What the chunk has of each place of its key."""
        with torch.no_grad():
            for number, destination in enumerate(self._targets.get(chunk.key, ())):
                self._filled[chunk.key, number] += destination.take(chunk.box, data)

    def finish(self) -> None:
        """Every place of every key got all its elements; only padding of the vocabulary has none in the checkpoint.

        Raises:
            InternalError: Some were left as they were.
        """
        for key, places in self._targets.items():
            saved = whole(self._opened.source.head.keys[key].shape)
            for number, destination in enumerate(places):
                common = destination.box.intersect(saved)
                wanted = 0 if common is None else common.volume
                if self._filled[key, number] != wanted:
                    raise InternalError(
                        expected=f"{wanted} elements of {common} to be filled",
                        found=f"{self._filled[key, number]}",
                        remedy="Report it with the layouts of the save and of this job.",
                        key=key,
                    )


def _install(opened: Opened, allocated: list[_Allocated]) -> None:
    if not opened.with_state:
        for part in opened.parts:
            for parameter, _ in part.parameters():
                part.adapter.install(parameter, None, None)
            part.adapter.finish(None)
        return
    for item in allocated:
        step = item.step.item() if item.step is not None else None
        if step is None:
            counted = opened.hyperparameters.get(item.plan.layout.optimizer_name, {}).get(STEP)
            step = None if counted is None else float(counted)
        item.part.adapter.install(item.parameter, item.slots, step if item.slots else None)
    for part in opened.parts:
        part.adapter.finish([_saved_group(opened, names, live) for live, names in part.group_names()])


def _saved_group(opened: Opened, names: list[str], live: Hyperparameters) -> Hyperparameters:
    """The one set of hyperparameters that a group's parameters were saved with."""
    saved = [opened.hyperparameters[name] for name in names if name in opened.hyperparameters]
    return saved[0] if saved else live


def refresh(module: Any) -> None:
    """Make loaded main weights the compute weights, as a `MegatronFSDP` module does after an optimizer step."""
    module.install_optimized_model_weights()
    module.synchronize_param_gather()
    module.start_param_sync()
