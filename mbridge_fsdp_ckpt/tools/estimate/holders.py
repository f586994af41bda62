# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""All ranks that hold something of one kind, in replica groups that hold the same; and which rank writes what.

The arithmetic is that of `plan.shares`, for all replica groups at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from mbridge_fsdp_ckpt.plan.shares import SLIVER, Line
from mbridge_fsdp_ckpt.tools.estimate.cuts import Blocks, Counts, Cuts, slice_records
from mbridge_fsdp_ckpt.tools.estimate.layout import DENSE, EXPERT, Ranks


@dataclass(frozen=True, slots=True)
class Held:
    """Of a parameter's component: what data-parallel ranks have, and what is saved of it.

    Args:
        cuts: What they have.
        dtypes: Of the weight, and of the slots that are cut like it.
        numbers: How many slots are numbers.
        bytes_per_element: See `ModelParameter`.
        part: The part of the model it belongs to.
    """

    cuts: Cuts
    dtypes: tuple[torch.dtype, ...]
    numbers: int
    bytes_per_element: int
    part: str


class Work(NamedTuple):
    """Some ranks hold blocks of a component, and some of them write them; one number each, or for all.

    Args:
        held: The component.
        holders: Ranks.
        writers: Those that write, in a shape of the same dimensions.
        bytes: Of one rank's records.
        records: How many these are.
        origins: Of its blocks.
    """

    held: Held
    holders: Ranks
    writers: Ranks
    bytes: Counts
    records: Counts
    origins: Counts


def groups(mesh: Ranks, along: Sequence[str], *, shards_outer: bool) -> Ranks:
    """Ranks by their place in their replica group, data-parallel rank, expert-parallel rank and tensor-parallel rank.

    Args:
        mesh: See `JobLayout.mesh`.
        along: The dimensions along which ranks hold the same, the slowest changing first; they are of size one then.
        shards_outer: Whether parameters are sharded over the outer dimension, too.
    """
    names = list(EXPERT if mesh.ndim == len(EXPERT) else DENSE)
    order = [names.index(name) for name in along]
    sharded = [name for name in (("shard", "outer") if shards_outer else ("outer", "shard")) if name not in along]
    shape = [math.prod(mesh.shape[axis] for axis in order)]
    for dimension in (sharded, ["expert"], ["tensor"]):
        axes = [names.index(name) for name in dimension if name in names and name not in along]
        order += axes
        shape.append(math.prod(mesh.shape[axis] for axis in axes))
    return mesh.transpose(order).reshape(shape)


def shared_out(ranks: Ranks, helds: Sequence[Held]) -> Iterator[Work]:
    """What each replica group holds, and which of its ranks writes it: `plan.shares.shared_out` for all replica groups.

    Args:
        ranks: See `replica groups`.
        helds: All that they hold, in the order of the model.
    """
    lengths, filled = (np.zeros(ranks.shape[1], dtype=np.int64) for _ in range(2))
    for held in helds:
        for blocks in held.cuts.blocks:
            lengths[blocks.ranks] += held.bytes_per_element * blocks.volumes
    lines = _Lines(lengths, ranks.shape[0])
    for held in helds:
        for blocks in held.cuts.blocks:
            sizes = held.bytes_per_element * blocks.volumes
            yield from _of_blocks(ranks, lines, held, blocks, filled[blocks.ranks], sizes)
            filled[blocks.ranks] += sizes


@dataclass(frozen=True, slots=True)
class _Lines:
    """`plan.shares.Line`, one for each replica group.

    Args:
        lengths: Bytes of all blocks.
        ranks: Of one replica group.
    """

    lengths: Counts
    ranks: int

    def part_at(self, groups: Counts, places: Counts) -> Counts:
        """See `Line.part_at`."""
        writers = self._writers(groups)
        parts: Counts = np.minimum(places * writers // np.maximum(1, self.lengths[groups]), writers - 1)
        return parts

    def writer_of(self, groups: Counts, parts: Counts) -> Counts:
        """See `Line.writer_of`."""
        writers: Counts = parts * self.ranks // self._writers(groups)
        return writers

    def _writers(self, groups: Counts) -> Counts:
        writers: Counts = np.clip(self.lengths[groups] // (2 * SLIVER), 1, self.ranks)
        return writers


def _of_blocks(
    ranks: Ranks, lines: _Lines, held: Held, blocks: Blocks, begins: Counts, sizes: Counts
) -> Iterator[Work]:
    groups = blocks.ranks
    first = lines.part_at(groups, begins)
    is_whole = first == lines.part_at(groups, begins + np.maximum(0, sizes - 1))
    whole = groups[is_whole]
    writers = ranks[lines.writer_of(whole, first[is_whole]), whole]
    numbers = (column[is_whole] for column in (blocks.bytes, blocks.records, blocks.origins))
    yield Work(held, ranks[:, whole], writers[None], *numbers)
    for number in np.flatnonzero(~is_whole):
        group, slice_ = int(groups[number]), blocks.slices[number]
        line = Line(int(lines.lengths[group]), lines.ranks)
        for part in line.parts(int(begins[number]), int(sizes[number]), slice_.rows):
            cut = slice_.part(part.begin, part.end)
            counts = np.array([*slice_records(cut, held.dtypes), cut.is_origin], dtype=np.int64)[:, None]
            yield Work(held, ranks[:, [group]], ranks[None, part.writer, [group]], *counts)
