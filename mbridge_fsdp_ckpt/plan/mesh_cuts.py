# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Which boxes of a tensor a rank holds that the dimensions of a device mesh cut.  Integers alone, no torch.

`Shard` cuts as `torch.chunk` does: equal parts, the last ones shorter or empty.  `_StridedShard` cuts what is there
into `split` parts, each of these as `Shard` does, and joins a rank's parts:

    8 rows, mesh (2, 2)                        rank (0, 0)   (0, 1)   (1, 0)   (1, 1)
        Shard, Shard                               0 1        2 3      4 5      6 7
        _StridedShard(split 2), Shard              0 1        4 5      2 3      6 7
        _StridedShard(split 2), Replicate        0 1 4 5    0 1 4 5  2 3 6 7  2 3 6 7        two boxes

FSDP2 over tensor parallelism on one dimension is the second line: its split is the number of parts that later
dimensions of the mesh make, which really cut first.  Where the tensor can be cut evenly, the order does not matter.
Otherwise torch's `compute_local_shape_and_global_offset`, which goes from left to right, tells of other rows than the
rank holds: of 7 rows on a mesh (3, 2), rank (2, 1) has row 6, and torch says that rank (2, 0) has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, product
from math import prod
from typing import NamedTuple

from mbridge_fsdp_ckpt.plan.boxes import Box, FlatRange, Shape
from mbridge_fsdp_ckpt.plan.layout import BoxSet


class Cut(NamedTuple):
    """How one dimension of a device mesh cuts a tensor.

    Args:
        dim: The tensor's dimension.
        place: This rank's along the mesh's.
        places: How many there are.
        split: The split factor of a `_StridedShard`; 1 for a `Shard`.
    """

    dim: int
    place: int
    places: int
    split: int = 1


def boxes_held(shape: Shape, cuts: Sequence[Cut]) -> BoxSet:
    """The boxes of a tensor that a rank holds.

    Args:
        shape: Of the whole tensor.
        cuts: In the order of the mesh; dimensions of the mesh that replicate are left out.
    """
    runs = [_runs(size, [cut for cut in cuts if cut.dim == dim]) for dim, size in enumerate(shape)]
    placed = [list(zip(of, accumulate(map(len, of), initial=0), strict=False)) for of in runs]
    boxes = []
    for block in product(*placed):
        size = tuple(len(run) for run, _ in block)
        boxes.append((Box(tuple(run.start for run, _ in block), size), Box(tuple(at for _, at in block), size)))
    return BoxSet(tuple(sum(map(len, of)) for of in runs), tuple(boxes) if prod(shape) else ())


def _runs(size: int, cuts: Iterable[Cut]) -> list[FlatRange]:
    """The rows that a rank holds along one dimension, as ranges that follow one another in its local tensor."""
    runs = [FlatRange(0, size)] if size else []
    for cut in _in_order(list(cuts)):
        parts = [_chunk(runs, number, cut.split) for number in range(cut.split)]
        runs = _joined(run for part in parts for run in _chunk(part, cut.place, cut.places))
    return runs


def _in_order(cuts: Sequence[Cut]) -> list[Cut]:
    """The order in which they were made: one that later ones split was made after them, and is plain."""
    ordered: list[Cut] = []
    for cut in reversed(cuts):
        if cut.split > 1 and cut.split == prod(later.places for later in ordered):
            ordered.append(cut._replace(split=1))
        else:
            ordered.insert(0, cut)
    return ordered


def _chunk(runs: Sequence[FlatRange], index: int, count: int) -> list[FlatRange]:
    """The part of some rows that `torch.chunk` gives as number `index` of `count`."""
    length = -(-sum(map(len, runs)) // count)
    wanted, found, before = FlatRange(index * length, (index + 1) * length), list[FlatRange](), 0
    for run in runs:
        common = wanted.intersect(FlatRange(before, before + len(run)))
        if common is not None:
            found.append(common.shift(run.start - before))
        before += len(run)
    return found


def _joined(runs: Iterable[FlatRange]) -> list[FlatRange]:
    """The same with one range for those that touch."""
    found: list[FlatRange] = []
    for run in runs:
        if found and found[-1].stop == run.start:
            found[-1] = FlatRange(found[-1].start, run.stop)
        else:
            found.append(run)
    return found
