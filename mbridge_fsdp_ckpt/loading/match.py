# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Matching a checkpoint's keys with what the live model and optimizer need."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mbridge_fsdp_ckpt.errors import KeyMismatchError, ManifestError
from mbridge_fsdp_ckpt.format.source import CheckpointSource, StoredChunk
from mbridge_fsdp_ckpt.live.optimizer.base import MASTER, STEP, SlotSpec, is_same_class, unless_known
from mbridge_fsdp_ckpt.live.planned import Planned
from mbridge_fsdp_ckpt.plan.boxes import Box, Shape, whole
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name
from mbridge_fsdp_ckpt.plan.keys import STATE_PREFIX, KeyEntry
from mbridge_fsdp_ckpt.plan.slices import Component, ParameterPlan
from mbridge_fsdp_ckpt.plan.tiling import tiling_defect
from mbridge_fsdp_ckpt.remedies import remedy
from mbridge_fsdp_ckpt.settings import Settings

NAMED = 20  # names that an error lists
_KEPT_WITH_SCALES = ("float16", "uint8")
"""Dtypes in which FusedAdam keeps slots with a scale a shard; this format stores the values that they stand for."""
_REMEDY = (
    "Load a checkpoint of the same model and optimizer.",
    "What is read follows {contents}.",
    "It has to be of the model that {hf_model} names; {not_strict} lets tensors be absent.",
    "Keys that may be absent can be named in {allow_missing}.",
    "Keys that may stay unread, in {allow_unexpected}.",
    "Slots that may be cast, in {allow_cast}.",
    "Weights alone are loaded with {weights_only}.",
)
WITHOUT_STATE = (
    "Load a checkpoint of the same optimizer.",
    "Or begin with a fresh one: name optimizer.* in {allow_missing}.",
    "Weights alone are loaded with {weights_only}.",
)
_KEYS_COMPARED = 50_000  # with one that is missing


class Match:
    """Collects the keys that this rank needs, and those that do not fit, so that one error can name them all.

    Args:
        source: The checkpoint.
        settings: The keys that may be missing, unexpected or cast.
        everything: Whether to match also components of which this rank holds no elements.  An error names them all
            then; without an error they are matched by the ranks that hold them.
    """

    def __init__(self, source: CheckpointSource, settings: Settings, *, everything: bool) -> None:
        self._source, self._settings, self._everything = source, settings, everything
        self.needed: dict[str, list[Box]] = defaultdict(list)
        self.asked: set[str] = set()
        self.let_go: set[str] = set()
        self.skipped: list[str] = []
        self._missing: list[str] = []
        self._unlike: list[str] = []

    def weights(self, item: Planned) -> None:
        """Match the components of a weight or buffer."""
        spec = SlotSpec("sharded", item.tensor.dtype)
        for component in self._components(item.plan):
            self._key(item.plan.model_key(component), spec, item.plan, component)

    def _components(self, plan: ParameterPlan) -> Collection[Component]:
        return plan.components if self._everything else dict.fromkeys(slice_.component for slice_ in plan.slices)

    def slots(self, plan: ParameterPlan, live_state: Callable[[str | None], LiveState]) -> MatchedSlots:
        """Match the slots that the checkpoint has of a parameter with those that the live optimizer keeps.

        Args:
            plan: The plan of the parameter.
            live_state: Takes the class that kept the saved state, and describes what the live optimizer keeps.
        """
        names = [plan.state_name(component) for component in self._components(plan)]
        found = {name: self._source.slots(name) for name in names}
        saved = {slot: entry for component in found.values() for slot, entry in component.items()}
        if not saved:
            name = plan.layout.optimizer_name
            if plan.slices and not self._source.stateless([name]):
                self._absent(f"{STATE_PREFIX}{name}.*")
            return MatchedSlots(found, {})
        live = live_state(next(iter(saved.values())).kept_by)
        specs = {slot: SlotSpec(entry.kind, dtype_from_name(entry.dtype)) for slot, entry in saved.items()}
        if live.slots is not None:
            kept = dict(live.slots)
            if STEP in specs and (live.counts_elsewhere or (STEP in kept and kept[STEP].kind == specs[STEP].kind)):
                kept[STEP] = specs[STEP]
            for slot in specs.keys() - kept.keys():
                self._surplus(plan, slot, saved[slot], live)
            before_a_step = saved.keys() == {MASTER}  # no other state there yet
            specs = {slot: spec for slot, spec in kept.items() if slot == MASTER or not before_a_step}
        for slot, spec in specs.items():
            if slot in saved or not (slot == MASTER or (slot == STEP and live.counted)):
                for component in self._components(plan):
                    self._slot(plan.slot_key(component, slot), slot, spec, plan, component, live)
        return MatchedSlots(found, specs)

    def _slot(
        self, key: str, slot: str, spec: SlotSpec, plan: ParameterPlan, component: Component, live: LiveState
    ) -> None:
        """Match one slot of a component: it must exist, come from an optimizer of the same class, and fit."""
        entry, weight = self._source.metadata.keys.get(key), self._source.metadata.keys.get(plan.model_key(component))
        weight_dtype = None if weight is None else dtype_from_name(weight.dtype)
        is_of_another = live.slots is None and entry is not None and _is_of_another_class(entry, live.class_name)
        if entry is not None and is_of_another and not self._settings.may_be_cast(key):
            kept_by = entry.kept_by or "an optimizer of torch or Transformer Engine"
            text = f"{key}: kept by {kept_by} in the checkpoint, {live.class_name} here (allow_cast must name the key)"
            self._unlike.append(text)
        elif entry is not None and slot != STEP and (problem := self._cast(key, entry, spec, weight_dtype)):
            self._unlike.append(problem)
        else:  # a counter is a number, however it is kept
            self._key(key, spec if slot != STEP or entry is None else _as_saved(entry), plan, component, of_slot=True)

    def _cast(self, key: str, entry: KeyEntry, spec: SlotSpec, weight_dtype: torch.dtype | None) -> str:
        """A text that says why a saved slot does not fit the live precision; empty where it fits."""
        saved, live = dtype_from_name(entry.dtype), spec.dtype if spec.scaled_from is None else spec.scaled_from
        is_of_stock = entry.kept_as is None and entry.dtype in _KEPT_WITH_SCALES
        if is_of_stock and (spec.scaled_from is not None or saved not in (spec.dtype, weight_dtype)):
            return f"{key}: {entry.dtype} without its scale, which stock does not save: load weights alone"
        kept = saved if entry.kept_as is None else dtype_from_name(entry.kept_as)
        narrows = not fits(kept, live) and saved.is_floating_point and live.is_floating_point
        if spec.scaled_from is not None:
            narrows = entry.kept_as is not None and kept != live and kept.itemsize >= live.itemsize
        if narrows and not self._settings.may_be_cast(key):
            return f"{key}: {kept} in the checkpoint, {live} here (allow_cast must name the key)"
        return "" if entry.kind == spec.kind else f"{key}: {entry.kind} in the checkpoint, {spec.kind} here"

    def _surplus(self, plan: ParameterPlan, slot: str, entry: KeyEntry, live: LiveState) -> None:
        """Match a slot that the live optimizer does not keep.  A master that repeats an fp32 weight is not read."""
        for component in self._components(plan):
            key = plan.slot_key(component, slot)
            weight = self._source.metadata.keys.get(plan.model_key(component))
            if slot == MASTER and weight is not None and weight.dtype == entry.dtype:
                self.asked.add(key)
                self.let_go.add(key)
            elif key in self._source.metadata.keys and not self._settings.may_be_unexpected(key):
                self._unlike.append(f"{key}: in the checkpoint, {live.class_name} here keeps no {slot}")

    def section(self, name: str) -> None:
        """Check that the checkpoint has a section, such as "optimizer"."""
        if name not in self._source.metadata.sections:
            self._absent(f"{name}.*")

    def _key(
        self, key: str, spec: SlotSpec, plan: ParameterPlan, component: Component, *, of_slot: bool = False
    ) -> None:
        entry = self._source.metadata.keys.get(key)
        if entry is None:
            self._absent(key)
            return
        self.asked.add(key)
        shape = component.global_shape if spec.kind == "sharded" else ()
        if entry.shape != shape and not self._is_padding(entry, shape, plan):
            self._unlike.append(self._unlike_shape(key, entry, shape, plan))
        elif not fits(saved := dtype_from_name(entry.dtype), spec.dtype) and not (
            of_slot and saved.is_floating_point and spec.dtype.is_floating_point  # see `_cast`
        ):
            self._unlike.append(f"{key}: {entry.dtype} in the checkpoint, {spec.dtype} here")
        elif spec.kind != "sharded":
            self.needed[key].append(Box((), ()))
        else:
            boxes = (covered(entry, slice_.box) for slice_ in plan.slices if slice_.component == component)
            self.needed[key].extend(box for box in boxes if box is not None)

    def _is_padding(self, entry: KeyEntry, shape: Shape, plan: ParameterPlan) -> bool:
        """Whether two shapes differ in padding rows of the vocabulary alone."""
        tokens = self._settings.vocabulary_size
        return (
            plan.layout.is_vocabulary
            and tokens is not None
            and entry.unpadded_rows in (None, tokens)
            and entry.shape[1:] == shape[1:]
            and len(entry.shape) == len(shape)
            and min(entry.shape[0], shape[0]) >= tokens
        )

    def _unlike_shape(self, key: str, entry: KeyEntry, shape: Shape, plan: ParameterPlan) -> str:
        text = f"{key}: shape {list(entry.shape)} in the checkpoint, {list(shape)} here"
        if not plan.layout.is_vocabulary:
            return text
        saved, here = entry.unpadded_rows, self._settings.vocabulary_size
        return f"{text} (tokens without padding: {saved or 'unknown'} there, {here or 'unknown'} in vocabulary_size)"

    def _known(self) -> Iterable[str]:
        """Keys of the checkpoint among which to look for similar names; none where there are too many."""
        return self._source.metadata.keys if len(self._source.metadata.keys) < _KEYS_COMPARED else ()

    def _absent(self, key: str) -> None:
        (self.skipped if self._settings.may_be_missing(key) else self._missing).append(key)

    @property
    def fits(self) -> bool:
        """Whether no key was missing, also none that may be missing, and all keys fit."""
        return not (self._missing or self._unlike or self.skipped)

    def finish(self) -> None:
        """Raise one error that names all keys that are missing or do not fit.

        Raises:
            KeyMismatchError: There are such keys.
        """
        if not self._missing and not self._unlike:
            return
        found = []
        if self._missing:
            found.append(f"{len(self._missing)} missing: {listed(self._missing, self._known())}")
        if self._unlike:
            found.append(f"{len(self._unlike)} that differ: {listed(self._unlike)}")
        raise KeyMismatchError(
            expected="a checkpoint of this model",
            found="; ".join(found),
            remedy=remedy(*_REMEDY),
        )


@dataclass(frozen=True, slots=True)
class LiveState:
    """What a live optimizer keeps of a parameter.

    Args:
        slots: The slots that the parameter has after a step, by name; None where that is unknown before a step.
        class_name: The class of the optimizer.
        counts_elsewhere: Whether the param group, not a slot of the parameter, counts its steps.
        counted: Whether the checkpoint has a step counter of the param group.
    """

    slots: dict[str, SlotSpec] | None
    class_name: str
    counts_elsewhere: bool
    counted: bool


class MatchedSlots(NamedTuple):
    """The slots of one parameter.

    Args:
        found: The slots that the checkpoint has, for each component by its name in the optimizer's state.
        specs: The slots to fill, whether the checkpoint has them or not.
    """

    found: dict[str, dict[str, KeyEntry]]
    specs: dict[str, SlotSpec]


def covered(entry: KeyEntry, box: Box) -> Box | None:
    """The part of a block that the checkpoint has.  The rest is padding of the vocabulary, beyond the saved rows.

    Args:
        entry: The key's description in the checkpoint.
        box: The block, in the global tensor.
    """
    return box.intersect(whole(entry.shape))


def _is_of_another_class(entry: KeyEntry, class_name: str) -> bool:
    """Whether a slot is known to have been kept by an optimizer of another class."""
    return entry.kept_as is not None and not is_same_class(entry.kept_by, unless_known(class_name))


def _as_saved(entry: KeyEntry) -> SlotSpec:
    return SlotSpec(entry.kind, dtype_from_name(entry.dtype))


def fits(saved: torch.dtype, live: torch.dtype) -> bool:
    """Whether a load may convert from one dtype to another: they are equal, or the conversion loses nothing."""
    return saved == live or (saved in (torch.bfloat16, torch.float16) and live in (torch.float32, torch.float64))


def listed(names: list[str], known: Iterable[str] = ()) -> str:
    """Names as a text for an error: the first 20, the first three of them with the most similar known name."""
    pool = list(known)
    shown: list[str] = []
    for name in sorted(names)[:NAMED]:
        near = difflib.get_close_matches(name, pool, 1, 0.8) if len(shown) < 3 else []
        shown.append(name + (f" (nearest: {near[0]})" if near else ""))
    return ", ".join(shown) + (f", and {len(names) - NAMED} more" if len(names) > NAMED else "")


def check_coverage(needed: dict[str, list[Box]], chunks: dict[str, list[StoredChunk]]) -> None:
    """Check that every needed element lies in exactly one chunk.

    Raises:
        ManifestError: An element lies in no chunk, or in two.
    """
    for key, boxes in needed.items():
        for box in boxes:
            defect = tiling_defect(box, (chunk.box for chunk in chunks[key]))
            if defect:
                raise ManifestError(
                    expected=f"chunks that cover {box} once",
                    found=defect,
                    remedy="The checkpoint is incomplete: use another one.",
                    key=key,
                )


def in_file_order(chunks: dict[str, list[StoredChunk]], needed: dict[str, list[Box]]) -> list[StoredChunk]:
    """The chunks that hold something needed, sorted by file and place in it."""
    touching = (
        chunk
        for key, boxes in needed.items()
        for chunk in chunks[key]
        if any(chunk.box.intersect(box) for box in boxes)
    )
    return sorted(touching, key=lambda chunk: (str(chunk.path), chunk.record.offset))
