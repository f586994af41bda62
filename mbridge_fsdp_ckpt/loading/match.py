"""Matching a checkpoint's keys with what the live model and optimizer need."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Collection, Iterable

import torch

from mbridge_fsdp_ckpt.errors import KeyMismatchError, ManifestError
from mbridge_fsdp_ckpt.live.planned import Planned
from mbridge_fsdp_ckpt.plan.boxes import Box, Shape, whole
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name
from mbridge_fsdp_ckpt.plan.keys import STATE_PREFIX, KeyEntry, Kind
from mbridge_fsdp_ckpt.plan.pieces import Component, ParameterPlan
from mbridge_fsdp_ckpt.plan.tiling import tiling_defect
from mbridge_fsdp_ckpt.settings import Settings
from mbridge_fsdp_ckpt.storage.source import CheckpointSource, StoredChunk

NAMED = 20  # names that an error lists
_KEYS_COMPARED = 50_000  # with one that is missing


class Match:
    """Collects what this rank needs and what does not fit, to name it all in one error.

    Args:
        source: The checkpoint.
        settings: See `Settings`.
        everything: Whether to look at components of which this rank holds nothing, too, as an error does that names all
            that is missing.  Each element is held by some rank.
    """

    def __init__(self, source: CheckpointSource, settings: Settings, *, everything: bool) -> None:
        self._source, self._settings, self._everything = source, settings, everything
        self.needed: dict[str, list[Box]] = defaultdict(list)
        self.asked: set[str] = set()
        self.skipped: list[str] = []
        self._missing: list[str] = []
        self._unlike: list[str] = []

    def weights(self, item: Planned) -> None:
        """The weight's components."""
        for component in self._components(item.plan):
            key = item.plan.model_key(component)
            self._key(key, component.global_shape, item.tensor.dtype, "sharded", item.plan, component)

    def _components(self, plan: ParameterPlan) -> Collection[Component]:
        return plan.components if self._everything else dict.fromkeys(piece.component for piece in plan.pieces)

    def slots(self, plan: ParameterPlan) -> dict[str, dict[str, KeyEntry]]:
        """All slots that the checkpoint has of a parameter; every component must have the same.

        Returns:
            The slots of each component, by its name in the optimizer's state.
        """
        names = [plan.state_name(component) for component in self._components(plan)]
        found = {name: self._source.slots(name) for name in names}
        kinds = {slot: entry for component in found.values() for slot, entry in component.items()}
        if not kinds and plan.pieces and not self._source.stateless([name := plan.layout.optimizer_name]):
            self._absent(f"{STATE_PREFIX}{name}.*")
        for slot, entry in kinds.items():
            for component in self._components(plan):
                shape = component.global_shape if entry.kind == "sharded" else ()
                dtype = dtype_from_name(entry.dtype)
                self._key(plan.slot_key(component, slot), shape, dtype, entry.kind, plan, component)
        return found

    def section(self, name: str) -> None:
        """A whole section that must be there."""
        if name not in self._source.head.sections:
            self._absent(f"{name}.*")

    def _key(
        self, key: str, shape: Shape, dtype: torch.dtype, kind: Kind, plan: ParameterPlan, component: Component
    ) -> None:
        entry = self._source.head.keys.get(key)
        if entry is None:
            self._absent(key)
            return
        self.asked.add(key)
        if entry.shape != shape and not self._is_padding(entry, shape, plan):
            self._unlike.append(self._unlike_shape(key, entry, shape, plan))
        elif not fits(dtype_from_name(entry.dtype), dtype):
            self._unlike.append(f"{key}: {entry.dtype} in the checkpoint, {dtype} here")
        elif kind != "sharded":
            self.needed[key].append(Box((), ()))
        else:
            saved = whole(entry.shape)
            boxes = (piece.box.intersect(saved) for piece in plan.pieces if piece.component == component)
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
        """Keys of the checkpoint, to find the nearest of; of a large one there are too many."""
        return self._source.head.keys if len(self._source.head.keys) < _KEYS_COMPARED else ()

    def _absent(self, key: str) -> None:
        (self.skipped if self._settings.may_be_missing(key) else self._missing).append(key)

    @property
    def fits(self) -> bool:
        """Whether nothing was missing or unlike, not even what may be."""
        return not (self._missing or self._unlike or self.skipped)

    def finish(self) -> None:
        """Raise one error over everything that did not fit."""
        if not self._missing and not self._unlike:
            return
        found = []
        if self._missing:
            found.append(f"{len(self._missing)} missing: {listed(self._missing, self._known())}")
        if self._unlike:
            found.append(f"{len(self._unlike)} unlike: {listed(self._unlike)}")
        raise KeyMismatchError(
            expected="a checkpoint of this model",
            found="; ".join(found),
            remedy="Load a checkpoint of the same model. Keys that may be absent can be named in allow_missing; "
            "optimizer state is not loaded with checkpoint.load_optim=False.",
        )


def fits(saved: torch.dtype, live: torch.dtype) -> bool:
    """Whether a load may convert: equal, or widening without loss: 16-bit floats into float32."""
    return saved == live or (saved in (torch.bfloat16, torch.float16) and live in (torch.float32, torch.float64))


def listed(names: list[str], known: Iterable[str] = ()) -> str:
    """Names for an error, up to a bound, the first with the nearest known name."""
    pool = list(known)
    shown: list[str] = []
    for name in sorted(names)[:NAMED]:
        near = difflib.get_close_matches(name, pool, 1, 0.8) if len(shown) < 3 else []
        shown.append(name + (f" (nearest: {near[0]})" if near else ""))
    return ", ".join(shown) + (f", and {len(names) - NAMED} more" if len(names) > NAMED else "")


def check_coverage(needed: dict[str, list[Box]], chunks: dict[str, list[StoredChunk]]) -> None:
    """Every needed element must lie in exactly one chunk.

    Raises:
        ManifestError: Some lie in none, or in two.
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
