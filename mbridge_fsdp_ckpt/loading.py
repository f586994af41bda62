"""The steps of a load, each of one rank; `checkpoint.load` tells their story."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mbridge_fsdp_ckpt import consensus
from mbridge_fsdp_ckpt.agreement import Agreement
from mbridge_fsdp_ckpt.errors import KeyMismatchError, ManifestError
from mbridge_fsdp_ckpt.geometry import Box, Shape, uncovered
from mbridge_fsdp_ckpt.inventory import KeyFilter, OptimizerPart, Planned, optimizer_parts, plan_model
from mbridge_fsdp_ckpt.optimizer_state import STEP, Slot, SlotSpec
from mbridge_fsdp_ckpt.parameters import find_fsdp_module, local_shard
from mbridge_fsdp_ckpt.plan import ParameterPlan, Piece
from mbridge_fsdp_ckpt.settings import Settings
from mbridge_fsdp_ckpt.storage.manifest import KeyEntry
from mbridge_fsdp_ckpt.storage.source import CheckpointSource, RankRecord, StoredChunk, open_checkpoint
from mbridge_fsdp_ckpt.storage.values import dtype_from_name
from mbridge_fsdp_ckpt.topology import coordinates

_STATE_PREFIX, _MODEL_PREFIX = "optimizer.state.", "model."
_NAMED = 20


@dataclass(slots=True)
class Opened:
    """A checkpoint that fits this rank, every byte it needs verified."""

    source: CheckpointSource
    model: Any
    planned: list[Planned]
    parts: list[OptimizerPart]
    with_state: bool
    chunks: dict[str, list[StoredChunk]]
    hyperparameters: dict[str, dict[str, Any]]
    slots: dict[str, dict[str, KeyEntry]]
    asked: set[str]
    skipped: list[str] = field(default_factory=list)


def prepare(
    directory: Path,
    model: Any,
    optimizer: Any,
    include: KeyFilter | None,
    settings: Settings,
    agreement: Agreement,
    *,
    with_state: bool,
) -> Opened:
    """Open the checkpoint, match it with the live model, and read and verify what this rank needs.

    Raises:
        KeyMismatchError: Keys are missing, or of another shape or dtype.
        CheckpointError: The checkpoint cannot be read.
    """
    source = open_checkpoint(directory)
    planned = [p for p in plan_model(model) if include is None or include(p.plan.layout.key)]
    parts = optimizer_parts(optimizer, plan_model(model)) if optimizer is not None else []
    opened = Opened(source, model, planned, parts, with_state and bool(parts), {}, {}, {}, set())
    match = _Match(source, settings)
    for item in planned:
        match.weights(item)
    if opened.with_state:
        opened.slots = _slots_by_name(source)
        names = [plan.layout.optimizer_name for part in parts for _, plan in part.parameters()]
        opened.hyperparameters = source.hyperparameters(names)
        match.section("optimizer")
        for part in parts:
            for _, plan in part.parameters():
                match.slots(plan, opened.slots)
    match.finish()
    opened.asked, opened.skipped = match.asked, match.skipped
    opened.chunks = source.chunks(sorted(match.needed))
    _check_coverage(opened, match.needed)
    for chunk in _in_file_order(_touching(opened, match.needed)):
        source.read(chunk)
        agreement.beat()
    return opened


class _Match:
    """Collects what this rank needs and what does not fit, to name it all in one error."""

    def __init__(self, source: CheckpointSource, settings: Settings) -> None:
        self._source, self._settings = source, settings
        self.needed: dict[str, list[Box]] = defaultdict(list)
        self.asked: set[str] = set()
        self.skipped: list[str] = []
        self._missing: list[str] = []
        self._unlike: list[str] = []

    def weights(self, item: Planned) -> None:
        """The weight's components."""
        for component in item.plan.components:
            key = item.plan.model_key(component.suffix)
            self._key(key, component.global_shape, item.tensor.dtype, "sharded", item.plan, component.suffix)

    def slots(self, plan: ParameterPlan, slots: dict[str, dict[str, KeyEntry]]) -> None:
        """All slots that the checkpoint has of a parameter; every component must have the same."""
        name = plan.layout.optimizer_name
        found = [slots.get(f"{name}{component.suffix}", {}) for component in plan.components]
        kinds = {slot: entry for component in found for slot, entry in component.items()}
        if not kinds and plan.pieces and name not in self._source.stateless:
            self._absent(f"{_STATE_PREFIX}{name}.*")
        for slot, entry in kinds.items():
            for component in plan.components:
                shape = component.global_shape if entry.kind == "sharded" else ()
                dtype = dtype_from_name(entry.dtype)
                self._key(plan.slot_key(component.suffix, slot), shape, dtype, entry.kind, plan, component.suffix)

    def section(self, name: str) -> None:
        """A whole section that must be there."""
        if name not in self._source.sections:
            self._absent(f"{name}.*")

    def _key(
        self, key: str, shape: Shape, dtype: torch.dtype, kind: str, plan: ParameterPlan, suffix: str
    ) -> None:
        entry = self._source.keys.get(key)
        if entry is None:
            self._absent(key)
            return
        self.asked.add(key)
        if entry.shape != shape:
            self._unlike.append(f"{key}: shape {list(entry.shape)} in the checkpoint, {list(shape)} here")
        elif not _fits(dtype_from_name(entry.dtype), dtype):
            self._unlike.append(f"{key}: {entry.dtype} in the checkpoint, {dtype} here")
        elif kind != "sharded":
            self.needed[key].append(Box((), ()))
        else:
            self.needed[key].extend(piece.box for piece in plan.pieces if piece.suffix == suffix)

    def _absent(self, key: str) -> None:
        (self.skipped if self._settings.may_be_missing(key) else self._missing).append(key)

    def finish(self) -> None:
        """Raise one error over everything that did not fit."""
        if not self._missing and not self._unlike:
            return
        found = []
        if self._missing:
            found.append(f"{len(self._missing)} missing: {_listed(self._missing, self._source.keys)}")
        if self._unlike:
            found.append(f"{len(self._unlike)} unlike: {_listed(self._unlike)}")
        raise KeyMismatchError(
            expected="a checkpoint of this model",
            found="; ".join(found),
            remedy="Load a checkpoint of the same model. Keys that may be absent can be named in allow_missing; "
            "optimizer state is not loaded with checkpoint.load_optim=False.",
        )


def _fits(saved: torch.dtype, live: torch.dtype) -> bool:
    """Equal, or widening without loss: 16-bit floats into float32."""
    return saved == live or (saved in (torch.bfloat16, torch.float16) and live in (torch.float32, torch.float64))


def _listed(names: list[str], known: Iterable[str] = ()) -> str:
    pool = list(known)
    shown = []
    for name in sorted(names)[:_NAMED]:
        near = difflib.get_close_matches(name, pool, 1, 0.8) if len(shown) < 3 and len(pool) < 50_000 else []
        shown.append(name + (f" (nearest: {near[0]})" if near else ""))
    return ", ".join(shown) + (f", and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _slots_by_name(source: CheckpointSource) -> dict[str, dict[str, KeyEntry]]:
    """Saved slots by optimizer name with component suffix."""
    found: dict[str, dict[str, KeyEntry]] = defaultdict(dict)
    for key, entry in source.keys.items():
        if key.startswith(_STATE_PREFIX):
            name, _, slot = key.removeprefix(_STATE_PREFIX).rpartition(".")
            found[name][slot] = entry
    return found


def _check_coverage(opened: Opened, needed: dict[str, list[Box]]) -> None:
    for key, boxes in needed.items():
        for box in boxes:
            rest = uncovered(box, (chunk.box for chunk in opened.chunks[key]))
            if rest:
                raise ManifestError(
                    expected=f"chunks that cover {box} once",
                    found=f"{rest} elements uncovered" if rest > 0 else f"{-rest} elements covered twice",
                    remedy="The checkpoint is incomplete: use another one.",
                    key=key,
                )


def _touching(opened: Opened, needed: dict[str, list[Box]]) -> Iterator[StoredChunk]:
    for key, boxes in needed.items():
        for chunk in opened.chunks[key]:
            if any(chunk.box.intersect(box) for box in boxes):
                yield chunk


def _in_file_order(chunks: Iterable[StoredChunk]) -> list[StoredChunk]:
    return sorted(chunks, key=lambda chunk: (str(chunk.path), chunk.offset))


def announce(opened: Opened) -> dict[str, Any]:
    """The bounded message for the agreement: a sketch of the keys that this rank asked for."""
    return {"asked": _key_sketch(_declared(opened))}


def _declared(opened: Opened) -> set[str]:
    """Keys whose first element this rank holds: over all ranks, each key once a replica."""
    origin = set()
    for item in opened.planned:
        origin |= {item.plan.model_key(suffix) for suffix in _origins(item.plan)}
    if opened.with_state:
        for part in opened.parts:
            for _, plan in part.parameters():
                for suffix in _origins(plan):
                    slots = opened.slots.get(f"{plan.layout.optimizer_name}{suffix}", {})
                    origin |= {plan.slot_key(suffix, slot) for slot in slots}
    return origin & opened.asked


def _origins(plan: ParameterPlan) -> list[str]:
    return [piece.suffix for piece in plan.pieces if piece.is_origin and plan.writes]


def _key_sketch(keys: Iterable[str]) -> list[int]:
    buckets = [0] * consensus.BUCKETS
    for key in keys:
        bucket = consensus.bucket_of(key)
        buckets[bucket] = (buckets[bucket] + consensus.key_word(key)) % consensus.WORD
    return buckets


def judge(opened: Any, settings: Settings) -> Callable[[list[Any]], dict[str, Any]]:
    """First meeting: does somebody ask for every key of the checkpoint?"""

    def judged(messages: list[Any]) -> dict[str, Any]:
        offered = _key_sketch(_offered(opened, settings))
        negative = [-word % consensus.WORD for word in offered]
        bad = consensus.add([*(message["asked"] for message in messages), negative])
        return {"disputed": bad, "unread": _unread_by_choice(opened, settings)}

    return judged


def _offered(opened: Opened, settings: Settings) -> list[str]:
    """Keys of the checkpoint that somebody has to ask for."""
    prefixes = (_MODEL_PREFIX, _STATE_PREFIX) if opened.with_state else (_MODEL_PREFIX,)
    return [key for key in opened.source.keys if key.startswith(prefixes) and not settings.may_be_unexpected(key)]


def _unread_by_choice(opened: Opened, settings: Settings) -> list[str]:
    return sorted(key for key in opened.source.keys if settings.may_be_unexpected(key))[:_NAMED]


def disputed(opened: Opened, buckets: list[int]) -> dict[str, Any]:
    """Keys that this rank asked for, in the buckets that did not add up."""
    wanted = set(buckets)
    asked = sorted(key for key in _declared(opened) if consensus.bucket_of(key) in wanted)
    return {"asked": asked, "buckets": buckets}


def judge_unexpected(opened: Any, settings: Settings) -> Callable[[list[Any]], dict[str, Any]]:
    """Only where keys of the checkpoint are left over: name them."""

    def judged(messages: list[Any]) -> dict[str, Any]:
        asked = {key for message in messages for key in message["asked"]}
        wanted = {bucket for message in messages for bucket in message["buckets"]}
        offered = [key for key in _offered(opened, settings) if consensus.bucket_of(key) in wanted]
        unexpected = [key for key in offered if key not in asked]
        raise KeyMismatchError(
            expected="every key of the checkpoint to have a place in the model",
            found=f"{len(unexpected)} unexpected: {_listed(unexpected)}",
            remedy="Load a checkpoint of the same model, or name keys to leave unread in allow_unexpected.",
        )

    return judged


def fill(opened: Opened, agreement: Agreement) -> None:
    """Copy verified bytes into live tensors and put optimizer state in place.

    Raises:
        CheckpointError, OSError: The storage failed since it was verified.
    """
    targets: dict[str, list[tuple[Piece | None, torch.Tensor]]] = defaultdict(list)
    for item in opened.planned:
        _add_targets(targets, item.plan, item.plan.model_key, local_shard(item.tensor).reshape(-1), opened.asked)
    allocated = [slots for part in opened.parts for slots in _allocate(opened, part, targets)] if opened.with_state else []
    needed = {key: [Box((), ()) if p is None else p.box for p, _ in places] for key, places in targets.items()}
    with torch.no_grad():
        for chunk in _in_file_order(_touching(opened, needed)):
            data = opened.source.read(chunk)
            for piece, flat in targets[chunk.key]:
                _copy(data, chunk.box, piece, flat)
            agreement.beat()
        _install(opened, allocated)


@dataclass(frozen=True, slots=True)
class _Allocated:
    part: OptimizerPart
    parameter: torch.Tensor
    plan: ParameterPlan
    slots: dict[str, Slot]
    step: torch.Tensor | None


def _allocate(
    opened: Opened, part: OptimizerPart, targets: dict[str, list[tuple[Piece | None, torch.Tensor]]]
) -> Iterator[_Allocated]:
    for parameter, plan in part.parameters():
        entries = opened.slots.get(f"{plan.layout.optimizer_name}{plan.components[0].suffix}", {})
        specs = {slot: SlotSpec(entry.kind, dtype_from_name(entry.dtype)) for slot, entry in entries.items()}
        slots = part.adapter.allocate(parameter, specs)
        for name, slot in slots.items():
            def key_of(suffix: str, name: str = name) -> str:
                return plan.slot_key(suffix, name)

            if slot.kind == "sharded":
                _add_targets(targets, plan, key_of, slot.tensor, opened.asked)
            else:
                targets[key_of(plan.components[0].suffix)].append((None, slot.tensor))
        step = None
        if STEP in specs:
            step = torch.zeros((), dtype=torch.float64)
            targets[plan.slot_key(plan.components[0].suffix, STEP)].append((None, step))
        yield _Allocated(part, parameter, plan, slots, step)


def _add_targets(
    targets: dict[str, list[tuple[Piece | None, torch.Tensor]]],
    plan: ParameterPlan,
    key_of: Callable[[str], str],
    flat: torch.Tensor,
    asked: set[str],
) -> None:
    for piece in plan.pieces:
        if key_of(piece.suffix) in asked:
            targets[key_of(piece.suffix)].append((piece, flat))


def _copy(data: torch.Tensor, box: Box, piece: Piece | None, flat: torch.Tensor) -> None:
    if piece is None:
        flat.copy_(data)
        return
    common = box.intersect(piece.box)
    if common is not None:
        destination = flat[piece.source.start : piece.source.stop].view(piece.box.size)
        destination[common.slices_in(piece.box)].copy_(data[common.slices_in(box)])


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
            step = opened.hyperparameters.get(item.plan.layout.optimizer_name, {}).get(STEP)
        item.part.adapter.install(item.parameter, item.slots, step if item.slots else None)
    for part in opened.parts:
        part.adapter.finish([_saved_group(opened, names, live) for live, names in part.group_names()])


def _saved_group(opened: Opened, names: list[str], live: dict[str, Any]) -> dict[str, Any]:
    """The one set of hyperparameters that a group's parameters were saved with."""
    saved = [opened.hyperparameters[name] for name in names if name in opened.hyperparameters]
    return saved[0] if saved else live


def refresh(opened: Opened) -> None:
    """Make the loaded main weights the compute weights, as Megatron-FSDP does after an optimizer step."""
    module = find_fsdp_module(opened.model)
    module.install_optimized_model_weights()
    module.synchronize_param_gather()
    module.start_param_sync()


def records_of(opened: Opened) -> tuple[RankRecord | None, tuple[RankRecord, ...]]:
    """The record saved at this rank's coordinates, and those of its (pipeline, tensor) place."""
    place = coordinates()
    near = tuple(
        record
        for record in opened.source.ranks()
        if all(record.coordinates.get(axis) == place.get(axis) for axis in ("pipeline", "tensor"))
    )
    exact = [record for record in near if dict(record.coordinates) == place]
    return (exact[0] if exact else None), near

