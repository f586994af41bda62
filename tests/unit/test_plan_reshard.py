"""Any layout writes every element once, and any other layout finds its own shards in what was written.

The oracle builds complete components with NumPy and forms each rank's fused parameter by stacking tensor-parallel
slices of them; it knows nothing of boxes or pieces.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mbridge_fsdp_ckpt.families import Claim, Segment
from mbridge_fsdp_ckpt.geometry import FlatRange, whole
from mbridge_fsdp_ckpt.parameters import Axis, ParameterLayout
from mbridge_fsdp_ckpt.plan import ParameterPlan, plan_parameter

Array = np.ndarray[Any, np.dtype[np.int64]]
Components = dict[str, Array]

SIZES = 1, 2, 4  # tensor-parallel sizes; every cut dimension is a multiple of the largest


@dataclass(frozen=True)
class Job:
    """A training job: how it cuts one parameter."""

    tensor_parallel: int
    dim: int | None
    segments: tuple[tuple[str, int], ...] | None
    cuts: tuple[int, ...]
    replicas: int

    def fused(self, components: Components, tp_rank: int) -> Array:
        """What one tensor-parallel rank holds: oracle."""
        local = {suffix: self._slice(array, tp_rank) for suffix, array in components.items()}
        if self.segments is None:
            return local[""]
        blocks = []
        taken = dict.fromkeys(local, 0)
        for suffix, rows in self.segments:
            blocks.append(local[suffix][taken[suffix] : taken[suffix] + rows])
            taken[suffix] += rows
        return np.concatenate(blocks)

    def _slice(self, array: Array, tp_rank: int) -> Array:
        return array if self.dim is None else np.split(array, self.tensor_parallel, self.dim)[tp_rank]

    def shards(self, components: Components) -> Iterator[tuple[ParameterPlan, Array]]:
        """Every rank's plan and elements."""
        claim = None if self.segments is None else Claim("any", 1, tuple(Segment(*s) for s in self.segments))
        tp_ranks = 1 if self.dim is None else self.tensor_parallel
        for tp_rank in range(tp_ranks):
            fused = self.fused(components, tp_rank)
            for start, stop in pairwise((0, *self.cuts, fused.size)):
                for replica in range(self.replicas):
                    layout = ParameterLayout(
                        "key",
                        "name",
                        fused.shape,
                        self.dim,
                        Axis(tp_rank, tp_ranks),
                        FlatRange(start, stop),
                        Axis(replica, self.replicas),
                    )
                    yield plan_parameter(layout, claim), fused.reshape(-1)[start:stop]


@st.composite
def parameters(draw: st.DrawFn) -> tuple[Components, Job, Job]:
    dim = draw(st.sampled_from([None, 0, 0, 1]))
    trailing = draw(st.lists(st.integers(1, 3), max_size=2))
    if dim == 1:
        trailing = [SIZES[-1] * draw(st.integers(1, 2)), *trailing[1:]]
    suffixes = draw(st.sampled_from([("",), ("_w", "_v"), (".a", ".b", ".c")]))
    fused = len(suffixes) > 1
    components, first = {}, 0
    for suffix in suffixes:
        rows = draw(st.integers(1, 3)) * (SIZES[-1] if dim == 0 else 1)
        shape = (rows, *trailing)
        components[suffix] = np.arange(first, first + math.prod(shape)).reshape(shape)
        first += math.prod(shape)
    return components, draw(jobs(components, dim, fused)), draw(jobs(components, dim, fused))


@st.composite
def jobs(draw: st.DrawFn, components: Components, dim: int | None, fused: bool) -> Job:
    tensor_parallel = draw(st.sampled_from(SIZES))
    divisor = tensor_parallel if dim == 0 else 1
    segments = draw(interleavings({s: len(a) // divisor for s, a in components.items()})) if fused else None
    total = sum(array.size for array in components.values()) // (1 if dim is None else tensor_parallel)
    row = math.prod(next(iter(components.values())).shape[1:]) // (tensor_parallel if dim == 1 else 1)
    step = draw(st.sampled_from([1, row]))
    cuts = draw(st.lists(st.integers(0, total // step), max_size=4))
    return Job(tensor_parallel, dim, segments, tuple(sorted(c * step for c in cuts)), draw(st.sampled_from([1, 3])))


@st.composite
def interleavings(draw: st.DrawFn, rows: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """Each component's rows in some portions, the portions of all components in any order."""
    segments: list[tuple[str, int]] = []
    for suffix, count in rows.items():
        edges = sorted({0, count, *draw(st.lists(st.integers(0, count), max_size=2))})
        segments += [(suffix, stop - start) for start, stop in pairwise(edges)]
    return tuple(draw(st.permutations(segments)))


@settings(deadline=None, max_examples=150)
@given(parameters())
def test_what_one_layout_writes_any_other_reads(case: tuple[Components, Job, Job]) -> None:
    components, saving, loading = case
    written = {suffix: np.full_like(array, -1) for suffix, array in components.items()}
    times = {suffix: np.zeros_like(array) for suffix, array in components.items()}
    for plan, shard in saving.shards(components):
        assert {c.suffix: c.global_shape for c in plan.components} == {s: a.shape for s, a in components.items()}
        for piece in plan.pieces if plan.writes else ():
            place = piece.box.slices_in(whole(components[piece.suffix].shape))
            written[piece.suffix][place] = shard[piece.source.start : piece.source.stop].reshape(piece.box.size)
            times[piece.suffix][place] += 1
    for suffix, array in components.items():
        assert (times[suffix] == 1).all()
        assert np.array_equal(written[suffix], array)

    for plan, shard in loading.shards(components):
        found = np.full_like(shard, -1)
        for piece in plan.pieces:
            block = written[piece.suffix][piece.box.slices_in(whole(components[piece.suffix].shape))]
            found[piece.source.start : piece.source.stop] = block.reshape(-1)
        assert np.array_equal(found, shard)


@settings(deadline=None, max_examples=50)
@given(parameters())
def test_one_writer_holds_the_origin_of_each_component(case: tuple[Components, Job, Job]) -> None:
    components, saving, _ = case
    origins = [p.suffix for plan, _ in saving.shards(components) if plan.writes for p in plan.pieces if p.is_origin]
    assert sorted(origins) == sorted(components)
