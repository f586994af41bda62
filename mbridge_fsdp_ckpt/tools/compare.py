# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Comparing two checkpoints that may lie on disk in different layouts: block by block, in bounded memory.

A's chunks   [......][......][......]        each common block is compared once; of each side one chunk is in
B's chunks   [...........][.........]        memory at a time
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from mbridge_fsdp_ckpt.errors import ManifestError
from mbridge_fsdp_ckpt.format.source import CheckpointSource, StoredChunk
from mbridge_fsdp_ckpt.plan.boxes import Box, whole
from mbridge_fsdp_ckpt.plan.dtypes import bits
from mbridge_fsdp_ckpt.plan.tiling import tiling_defect

_ELEMENTS = 1 << 22  # compared at a time
_KINDS = dict, list, tuple  # of containers in nested state
_PLAIN = frozenset(string.ascii_letters + string.digits + "_-/")  # in names that need no quotes

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """When two numbers count as equal: |a - b| <= absolute + relative * |b|; both zero: bit by bit."""

    relative: float = 0.0
    absolute: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether bits must be equal."""
        return self.relative == 0 and self.absolute == 0


@dataclass(frozen=True, slots=True)
class Unequal:
    """How a tensor differs.

    Args:
        elements: How many elements do.
        total: How many elements were compared.
        largest: Largest absolute difference among them; NaN where a NaN is on one side only, or none is defined.
    """

    elements: int
    total: int
    largest: float

    def plus(self, other: Unequal) -> Unequal:
        """The difference of two parts of a tensor together."""
        pair = (self.largest, other.largest)
        largest = math.nan if any(map(math.isnan, pair)) else max(pair)
        return Unequal(self.elements + other.elements, self.total + other.total, largest)


_NOTHING = Unequal(0, 0, 0.0)


@dataclass(frozen=True, slots=True)
class Side:
    """A checkpoint, and the chunks of one key in it."""

    source: CheckpointSource
    chunks: list[StoredChunk]


def compare_key(key: str, a: Side, b: Side, tolerance: Tolerance, progress: Progress = lambda count: None) -> Unequal:
    """Compare a tensor that has the same shape and dtype in both.

    Raises:
        DamagedCheckpointError: Bytes are not those that were written.
        ManifestError: Chunks don't cover the tensor.
    """
    left, right = _OneChunk(a.source, progress), _OneChunk(b.source)
    found = _NOTHING
    for one, other, common in _pairs(_tiling(key, a), _tiling(key, b)):
        x = left.read(one)[common.slices_in(one.box)]
        found = found.plus(compare(x, right.read(other)[common.slices_in(other.box)], tolerance))
    return found


def _pairs(ours: list[StoredChunk], theirs: list[StoredChunk]) -> Iterator[tuple[StoredChunk, StoredChunk, Box]]:
    """Chunks that have a block in common; both sides sorted by offset, so that far ones are never looked at."""
    start = 0
    for chunk in ours:
        while start < len(theirs) and _before(theirs[start].box, chunk.box):
            start += 1
        for other in islice(theirs, start, None):
            if _before(chunk.box, other.box):
                break
            common = chunk.box.intersect(other.box)
            if common is not None:
                yield chunk, other, common


def _before(one: Box, other: Box) -> bool:
    return bool(one.size) and one.end[0] <= other.offset[0]


class _OneChunk:
    """Remembers the chunk that was read last: neighbouring blocks share it."""

    def __init__(self, source: CheckpointSource, progress: Progress = lambda count: None) -> None:
        self._source, self._progress = source, progress
        self._chunk: StoredChunk | None = None
        self._tensor = torch.empty(0)

    def read(self, chunk: StoredChunk) -> torch.Tensor:
        if chunk is not self._chunk:
            self._chunk, self._tensor = None, torch.empty(0)  # the old one goes before the new one comes
            self._chunk, self._tensor = chunk, self._source.read(chunk)
            self._progress(self._tensor.nbytes)
        return self._tensor


def _tiling(key: str, side: Side) -> list[StoredChunk]:
    """The chunks of a key, sorted by offset; checks that they cover the key.

    Raises:
        ManifestError: They do not cover it once.
    """
    defect = tiling_defect(whole(side.source.metadata.keys[key].shape), (chunk.box for chunk in side.chunks))
    if defect:
        raise ManifestError(
            expected="chunks that cover the tensor once",
            found=defect,
            remedy=f"Run verify on {side.source.metadata.directory.name}.",
            key=key,
        )
    return sorted(side.chunks, key=lambda chunk: chunk.box.offset)


def compare(a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance) -> Unequal:
    """Compare two tensors of one shape and dtype."""
    found = _NOTHING
    for left, right in zip(_pieces(a), _pieces(b), strict=True):
        found = found.plus(_compare_piece(left, right, tolerance))
    return found


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Flat pieces of a bounded size; copies only where the block is not contiguous."""
    yield from tensor.reshape(-1).split(_ELEMENTS) if tensor.numel() else ()


def _compare_piece(a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance) -> Unequal:
    unlike = _unlike_bits(a, b)
    if not unlike.any():
        return Unequal(0, a.numel(), 0.0)
    try:
        x, y = _wide(a[unlike]), _wide(b[unlike])
    except NotImplementedError:  # a dtype that torch stores and cannot calculate with, such as float4
        return Unequal(int(unlike.sum()), a.numel(), math.nan)
    if not tolerance.exact:
        far = ~torch.isclose(x, y, rtol=tolerance.relative, atol=tolerance.absolute, equal_nan=True)
        x, y = x[far], y[far]
    if not x.numel():
        return Unequal(0, a.numel(), 0.0)
    distance = torch.where(x == y, 0.0, (x - y).abs())  # inf - inf is no difference, 0.0 and -0.0 neither
    return Unequal(x.numel(), a.numel(), float(distance.max()))  # max of a NaN is NaN


def _unlike_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    unlike = bits(a.contiguous()) != bits(b.contiguous())
    return unlike.any(-1) if unlike.dim() > a.dim() else unlike


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


@dataclass(frozen=True, slots=True)
class Container:
    """In the place of a container in nested state: what kind it is, whatever is in it.

    Args:
        kind: A list, a tuple or a mapping.
        empty: Whether nothing else tells of it.
    """

    kind: str
    empty: bool = field(compare=False)


def flattened(value: Any, name: str) -> dict[str, Any]:
    """Nested state as dotted names with what stands there; each container too, with its kind.

    A name that has a dot is quoted, one that is no string stands in brackets: no two names are alike.
    """
    if not isinstance(value, (dict, list, tuple)):
        return {name: value}
    found: dict[str, Any] = {name: Container(next(k.__name__ for k in _KINDS if isinstance(value, k)), not value)}
    items = value.items() if isinstance(value, dict) else ((str(place), item) for place, item in enumerate(value))
    for key, inner in items:
        found |= flattened(inner, f"{name}.{_quoted(key)}")
    return found


def _quoted(key: Any) -> str:
    if not isinstance(key, str):
        return f"[{key!r}]"
    return repr(key) if not key or not _PLAIN.issuperset(key) else key


def unlike(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """Names of nested state under which two sides have something else, or one has nothing.

    A container that one side lacks is named by what is in it.
    """
    found = []
    for name in {**left, **right}:
        if name in left and name in right:
            differs = not same_value(left[name], right[name])
        else:
            alone = left[name] if name in left else right[name]
            differs = not isinstance(alone, Container) or alone.empty
        if differs:
            found.append(name)
    return found


def same_value(a: Any, b: Any) -> bool:
    """Whether two leaves of non-tensor state are the same: types, and numbers bit by bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and compare(a, b, Tolerance()).elements == 0
    if hasattr(a, "tobytes"):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1.0, a) == math.copysign(1.0, b))
    if isinstance(a, complex):
        return same_value(a.real, b.real) and same_value(a.imag, b.imag)
    if isinstance(a, (set, frozenset)):  # in which 1, 1.0 and True are one element
        return len(a) == len(b) and all(any(same_value(one, other) for other in b) for one in a)
    return bool(a == b)
