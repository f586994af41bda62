# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The parts of the check: it sees what differs, and says so on all ranks."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

from testing.gpu import state
from testing.gpu.__main__ import SECTIONS, decided
from testing.gpu.copies import kinds
from testing.gpu.job import Job, Options
from testing.gpu.large import recipe_of
from testing.gpu.resume import SMALL
from testing.models import build
from testing.ranks import RankPool

ALL: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}


def notes() -> tuple[list[str], dict[str, str], list[bool], list[int | None]]:
    job = Job(Options(True, 0, "", "", 0.0, ""), time.monotonic())
    rank = dist.get_rank()
    job.expect("it holds everywhere", True)
    job.expect("it holds on rank 0", rank == 0)
    worked = [job.attempt("a sum", lambda: 1 + 1), job.attempt("a quotient", lambda: 1 // rank)]
    refused = [job.refused("this", None), job.refused("that", "rank 1 has no room" if rank == 1 else None)]
    return job.failures, job.not_run, refused, worked


def test_what_fails_on_one_rank_is_noted_on_all(rank_pool: RankPool) -> None:
    failures = [
        "it holds on rank 0: not on rank 1",
        "a quotient: rank 0 raised ZeroDivisionError: integer division or modulo by zero",
    ]
    first, second = rank_pool.run(notes, ranks=2)
    assert first == (failures, {"that": "rank 1 has no room"}, [False, True], [2, None])
    assert second == (*first[:3], [2, 1])


def changes() -> list[set[str]]:
    """Names of tensors whose digest changes when one element of one of them does, tensor after tensor; then all."""
    run = build(SMALL)
    run.step(0)
    found = []
    before = state.digests(run)
    for name, tensor in list(state.tensors(run)):
        if tensor.numel():
            tensor.reshape(-1)[-1] += 1
            after = state.digests(run)
            found.append({name} ^ {other for other in after if after[other] != before[other]})
            before = after
    state.clear(run)
    found.append({name for name, tensor in state.tensors(run) if tensor.any()})
    return found


def test_one_changed_element_is_seen(megatron_ranks: RankPool) -> None:
    for found in megatron_ranks.run(changes, ranks=2):
        assert len(found) > 20
        assert set().union(*found) == set()


@pytest.mark.quick
def test_a_check_passes_if_all_of_it_came_and_nothing_failed() -> None:
    whole = decided({"sections": ALL}, None)
    assert whole == {"passed": True, "reasons": [], "not_run": {}, "section_seconds": {}, **ALL}
    assert decided({"sections": ALL, "failures": ["x"]}, None)["reasons"] == ["x"]
    assert decided({"sections": ALL, "failures": ["x"]}, "rank 1 died")["reasons"] == ["x", "rank 1 died"]
    some = decided({"sections": {"resume": {}}, "not_run": {"FP8": "needs a GPU"}}, None)
    assert some["reasons"] == ["no results of large, overlap, copies"]
    assert some["not_run"]["FP8"] == "needs a GPU"
    assert not any(report["passed"] for report in (some, decided({"sections": ALL, "failures": ["x"]}, None)))


@pytest.mark.quick
@pytest.mark.parametrize("size", [1, 4_000_000, 600_000_000, 20_000_000_000])
def test_a_large_model_has_the_state_that_was_asked_for(size: int) -> None:
    recipe = recipe_of(size)
    layer = 4 * recipe.hidden**2 + 3 * recipe.hidden * recipe.ffn
    assert 12 * (recipe.layers * layer + 2 * 64 * recipe.hidden) >= size
    assert 12 * ((recipe.layers - 1) * layer + 2 * 64 * recipe.hidden) < max(size, 200_000)


def event(kind: str, name: str, begin: float, duration: float, **args: Any) -> dict[str, Any]:
    return {"cat": kind, "name": name, "ts": begin, "dur": duration, "args": args}


@pytest.mark.quick
def test_copies_are_counted_by_kind_with_the_time_that_kernels_ran_beside_them() -> None:
    trace = [
        event("kernel", "mm", 0, 10),
        event("kernel", "mm", 5, 10),  # on another stream: kernels run from 0 to 15
        event("kernel", "mm", 20, 10),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 10, 15, bytes=100),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 40, 5, bytes=11),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 15, 5, bytes=7),
    ]
    assert kinds(trace) == {
        "Memcpy DtoH (Device -> Pinned)": {"copies": 2, "bytes": 111, "seconds": 20e-6, "beside_kernels_s": 10e-6},
        "Memcpy DtoH (Device -> Pageable)": {"copies": 1, "bytes": 7, "seconds": 5e-6, "beside_kernels_s": 0},
    }
