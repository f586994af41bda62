# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Any layout writes every element once, and any other layout finds its own shards in what was written.

The oracle builds complete components with NumPy and forms each rank's fused parameter by stacking tensor-parallel
slices of them; it knows nothing of boxes or slices.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mbridge_fsdp_ckpt.families import Claim, Segment
from mbridge_fsdp_ckpt.plan.boxes import FlatRange, whole
from mbridge_fsdp_ckpt.plan.layout import Axis, ParameterLayout
from mbridge_fsdp_ckpt.plan.shares import SLIVER, shared_out
from mbridge_fsdp_ckpt.plan.slices import ParameterPlan, plan_parameter
from mbridge_fsdp_ckpt.plan.tiling import PRIME, TilingFingerprint

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
    bytes_per_element: int = 0
    """What copies are shared out by."""

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
        if self.dim is None:
            return array
        return np.split(array, self.tensor_parallel, self.dim)[tp_rank]

    def shards(self, components: Components) -> Iterator[tuple[ParameterPlan, Array]]:
        """Every rank's plan and elements."""
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
                    (plan,) = shared_out([plan_parameter(layout, self._claim())], [self.bytes_per_element])
                    yield plan, fused.reshape(-1)[start:stop]

    def _claim(self) -> Claim | None:
        if self.segments is None:
            return None
        return Claim("any", 1, tuple(Segment(suffix, rows) for suffix, rows in self.segments))


@st.composite
def parameters(draw: st.DrawFn) -> tuple[Components, Job, Job]:
    dim = draw(st.sampled_from([None, 0, 0, 1]))
    trailing = draw(st.lists(st.integers(1, 3), max_size=2))
    if dim == 1:
        trailing = [SIZES[-1] * draw(st.integers(1, 2)), *trailing[1:]]
    suffixes = draw(st.sampled_from([("",), ("_w", "_v"), (".a", ".b", ".c")]))
    is_fused = len(suffixes) > 1
    components, first = {}, 0
    for suffix in suffixes:
        shape = [draw(st.integers(1, 3)) * (SIZES[-1] if dim == 0 else 1), *trailing]
        components[suffix] = np.arange(first, first + math.prod(shape)).reshape(shape)
        first += math.prod(shape)
    return components, draw(jobs(components, dim, is_fused)), draw(jobs(components, dim, is_fused))


@st.composite
def jobs(draw: st.DrawFn, components: Components, dim: int | None, is_fused: bool) -> Job:
    tensor_parallel = draw(st.sampled_from(SIZES))
    rows = {suffix: array.shape[0] // (tensor_parallel if dim == 0 else 1) for suffix, array in components.items()}
    segments = draw(interleavings(rows)) if is_fused else None
    job = Job(tensor_parallel, dim, segments, (), draw(st.sampled_from([1, 3])))
    local = job.fused(components, 0)
    step = draw(st.sampled_from([1, math.prod(local.shape[1:])]))
    cuts = draw(st.lists(st.integers(0, local.size // step), max_size=4))
    return replace(
        job,
        cuts=tuple(sorted(cut * step for cut in cuts)),
        bytes_per_element=draw(st.sampled_from([1, SLIVER // 3, 2 * SLIVER])),
    )


@st.composite
def interleavings(draw: st.DrawFn, rows: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """Each component's rows in some portions, the portions of all components in any order."""
    segments: list[tuple[str, int]] = []
    for suffix, count in rows.items():
        edges = sorted({0, count, *draw(st.lists(st.integers(0, count), max_size=2))})
        segments += [(suffix, stop - start) for start, stop in pairwise(edges)]
    return tuple(draw(st.permutations(segments)))


@settings(deadline=None, max_examples=300)
@given(parameters())
def test_what_one_layout_writes_any_other_reads(case: tuple[Components, Job, Job]) -> None:
    components, saving, loading = case
    written = {suffix: np.full_like(array, -1) for suffix, array in components.items()}
    times = {suffix: np.zeros_like(array) for suffix, array in components.items()}
    for plan, shard in saving.shards(components):
        assert {c.suffix: c.global_shape for c in plan.components} == {s: a.shape for s, a in components.items()}
        for slice_ in plan.slices:
            place = slice_.box.slices_in(whole(slice_.component.global_shape))
            if slice_.writes:
                written[slice_.component.suffix][place] = slice_.block(shard)
                times[slice_.component.suffix][place] += 1
    for suffix, array in components.items():
        assert (times[suffix] == 1).all()
        assert np.array_equal(written[suffix], array)

    for plan, shard in loading.shards(components):
        found = np.full_like(shard, -1)
        for slice_ in plan.slices:
            place = slice_.box.slices_in(whole(slice_.component.global_shape))
            slice_.block(found)[...] = written[slice_.component.suffix][place]
        assert np.array_equal(found, shard)


@settings(deadline=None, max_examples=50)
@given(parameters())
def test_one_writer_holds_the_origin_of_each_component(case: tuple[Components, Job, Job]) -> None:
    components, saving, _ = case
    slices = [slice_ for plan, _ in saving.shards(components) for slice_ in plan.slices]
    origins = [slice_.component.suffix for slice_ in slices if slice_.writes and slice_.is_origin]
    assert sorted(origins) == sorted(components)


@settings(deadline=None, max_examples=100)
@given(parameters())
def test_the_fingerprint_of_all_writers_adds_up(case: tuple[Components, Job, Job]) -> None:
    components, saving, _ = case
    totals = dict.fromkeys(components, 0)
    for plan, _ in saving.shards(components):
        for slice_ in plan.slices:
            if slice_.writes:
                tiling = TilingFingerprint.of(slice_.component.suffix, slice_.component.global_shape)
                totals[slice_.component.suffix] += tiling.of_box(slice_.box)
    for suffix, array in components.items():
        assert totals[suffix] % PRIME == TilingFingerprint.of(suffix, array.shape).of_whole() % PRIME
