# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Which copies between device and host a call makes, and whether the device computes meanwhile, by torch's profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

import mbridge_fsdp_ckpt
from testing.gpu.job import Job
from testing.gpu.resume import OVERLAPPED, SMALL
from testing.models import build

Span = tuple[float, float]


def copies(job: Job) -> dict[str, Any]:
    """Of a save, a load, and a step with an optimizer on the host: copies by kind, as the profiler names it.

    "Device -> Pageable" waits for the copy, "Device -> Pinned" need not.
    """
    directory = Path(job.options.disk) / "iter_0000100"
    plain, offloaded = build(SMALL), build(OVERLAPPED)
    for run in (plain, offloaded):
        run.step(0)
    calls: dict[str, Callable[[], object]] = {
        "a save": lambda: mbridge_fsdp_ckpt.save(directory, model=plain.model, optimizer=plain.optimizer),
        "a load": lambda: mbridge_fsdp_ckpt.load(directory, model=plain.model, optimizer=plain.optimizer),
        "a step, offload 1.0, overlap": lambda: offloaded.step(1),
    }
    found = {}
    for name, call in calls.items():
        by_kind = kinds(_traced(call))
        if not job.refused(f"copies of {name}", None if by_kind else "the profiler saw no copies on a device"):
            found[name] = by_kind
    return found


def _traced(call: Callable[[], object]) -> list[dict[str, Any]]:
    """What the device did, by the profiler's trace."""
    cuda = ProfilerActivity.CUDA
    torch.cuda.synchronize()
    with profile(activities=[cuda if cuda in supported_activities() else ProfilerActivity.CPU]) as profiler:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("cat") in ("gpu_memcpy", "kernel")]


def kinds(events: Iterable[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Copies by kind: how many, bytes, seconds, and for how many of these a kernel ran, too.

    Args:
        events: Of a trace in Chrome's format: copies and kernels, times in microseconds.
    """
    events = list(events)
    kernels = _merged(_span(event) for event in events if event["cat"] == "kernel")
    found: dict[str, dict[str, float]] = {}
    for event in events:
        if event["cat"] == "gpu_memcpy":
            kind = found.setdefault(event["name"], dict.fromkeys(("copies", "bytes", "seconds", "beside_kernels_s"), 0))
            kind["copies"] += 1
            kind["bytes"] += event["args"]["bytes"]
            kind["seconds"] += event["dur"] / 1e6
            kind["beside_kernels_s"] += sum(_common(_span(event), kernel) for kernel in kernels) / 1e6
    return found


def _span(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _common(left: Span, right: Span) -> float:
    return max(0.0, min(left[1], right[1]) - max(left[0], right[0]))


def _merged(spans: Iterable[Span]) -> list[Span]:
    """The same time without overlaps: kernels of several streams run at once."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged
