# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The shard map: which rank holds which block of which key, bounded however large the checkpoint is.

One bar a key.  Dimension 0 runs along it from left to right, dimension 1 from top to bottom; further dimensions are
not drawn.  The colour says the rank.
"""

from __future__ import annotations

import colorsys
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.tools.drawing import FEW
from mbridge_fsdp_ckpt.tools.survey import Survey

MAX_KEYS = 100
"""Bars on one map."""
MAX_BLOCKS = 512
"""Blocks in one bar; beyond, neighbours are drawn as one."""
_MAX_COLLECTED = 200_000

NAMED_RANKS = 32
"""Up to here each rank is named; beyond, ranks are summarised."""


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a bar, in fractions of it, and the ranks that hold it."""

    left: float
    top: float
    width: float
    height: float
    first_rank: int
    last_rank: int
    text: str

    @property
    def right(self) -> float:
        """Its right end."""
        return self.left + self.width

    @property
    def bottom(self) -> float:
        """Its lower end."""
        return self.top + self.height


@dataclass(frozen=True, slots=True)
class Bar:
    """A key with its blocks."""

    key: str
    entry: KeyEntry
    blocks: tuple[Block, ...]
    merged: bool


@dataclass(slots=True)
class ShardMap:
    """The bars, and what was left out.

    Args:
        pattern: What keys match.
        selected: Keys on the map.
        matching: How many keys match.
    """

    pattern: str
    selected: dict[str, KeyEntry]
    matching: int
    _boxes: dict[str, list[tuple[Box, int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Survey, pattern: str) -> ShardMap:
        """An empty map of the keys that match, in natural order, as many as fit."""
        matching = sorted((key for key in found.keys if fnmatchcase(key, pattern)), key=natural)
        world = found.topology.get("world", 0)
        room = _MAX_COLLECTED // max(1, world if isinstance(world, int) else 0)
        shown = matching[: max(1, min(MAX_KEYS, room))]
        return cls(pattern, {key: found.keys[key] for key in shown}, len(matching))

    def visit(self, key: str, rank: int, box: Box) -> None:
        """Take a chunk, if it is of a key on the map."""
        if key in self.selected:
            self._boxes.setdefault(key, []).append((box, rank))

    def bars(self) -> list[Bar]:
        """The bars, top to bottom."""
        return [_bar(key, entry, self._boxes.get(key, [])) for key, entry in self.selected.items()]

    def left_out(self) -> str:
        """What the map does not show, in words; empty where it shows all."""
        rest = self.matching - len(self.selected)
        if not rest:
            return ""
        return f"{rest} more keys match {self.pattern} and are left out: narrow the map with --key."


def natural(key: str) -> list[tuple[int, str]]:
    """Sorts layers.2 before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", key)]


def _bar(key: str, entry: KeyEntry, boxes: list[tuple[Box, int]]) -> Bar:
    ordered = sorted(boxes, key=lambda pair: (pair[0].offset, pair[1]))
    run = -(-len(ordered) // MAX_BLOCKS)
    groups = (ordered[i : i + run] for i in range(0, len(ordered), run)) if run else ()
    return Bar(key, entry, tuple(_block(group, entry.shape) for group in groups), run > 1)


def _block(group: list[tuple[Box, int]], shape: tuple[int, ...]) -> Block:
    boxes, ranks = [box for box, _ in group], [rank for _, rank in group]
    low = [min(starts) for starts in zip(*(box.offset for box in boxes), strict=True)]
    high = [max(ends) for ends in zip(*(box.end for box in boxes), strict=True)]
    spans = [(a / n, (b - a) / n) if n else (0.0, 0.0) for a, b, n in zip(low, high, shape, strict=True)]
    (left, width), (top, height) = [*spans, (0.0, 1.0), (0.0, 1.0)][:2]
    first, last = min(ranks), max(ranks)
    who = "rank unknown" if last < 0 else f"rank {first}" if first == last else f"ranks {first} to {last}"
    place = ", ".join(f"{a}:{b}" for a, b in zip(low, high, strict=True))
    count = f", {len(group)} chunks" if len(group) > 1 else ""
    return Block(left, top, width, height, first, last, f"{who}: [{place}]{count}")


def colours(ranks: Iterable[int]) -> Mapping[int, str]:
    """A colour for each rank: easy to tell apart where they are few, a scale where they are many."""
    ordered = sorted(ranks)
    if len(ordered) <= len(FEW):
        return dict(zip(ordered, FEW, strict=False))
    return {rank: _on_scale(index, len(ordered)) for index, rank in enumerate(ordered)}


def _on_scale(index: int, count: int) -> str:
    hue = 0.67 * (1 - index / (count - 1))  # blue to red
    light = (0.42, 0.58)[index % 2]  # neighbours differ
    red, green, blue = (round(255 * part) for part in colorsys.hls_to_rgb(hue, light, 0.55))
    return f"#{red:02x}{green:02x}{blue:02x}"


def describe(entry: KeyEntry) -> str:
    """Shape, dtype and bytes: 4096 × 1024 bfloat16."""
    shape = " × ".join(map(str, entry.shape)) or "scalar"
    return f"{shape} {entry.dtype}"
