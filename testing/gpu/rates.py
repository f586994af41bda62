# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What the machine can do without this package: copies, hashing, files, and copies beside computation."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from mbridge_fsdp_ckpt.io.checksums import HASHED_AT_ONCE
from testing.gpu.job import Job, rate, seconds_of

REPEATS = 5
_BLOCK = 1 << 24


def overlap(job: Job) -> dict[str, Any]:
    """Seconds of a copy to the host alone, of as much computation alone, and of both at once."""
    size, width = (1 << 20, 64) if job.options.cpu else (1 << 31, 8192)
    source = torch.ones(size, dtype=torch.uint8, device="cuda")
    factor = torch.randn(width, width, device="cuda").bfloat16()
    product, stream = torch.empty_like(factor), torch.cuda.Stream()
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    targets = {"pinned": pinned, "pageable": torch.empty(size, dtype=torch.uint8, device="cpu").fill_(0)}

    def copy(target: torch.Tensor) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(factor, factor, out=product)

    def both(times: int, target: torch.Tensor) -> None:
        compute(times)
        copy(target)

    _least(partial(compute, 1))
    times = max(1, round(_least(partial(copy, pinned)) / _least(partial(compute, 1))))
    found: dict[str, Any] = {"bytes": size, "matrix_products": times, "compute_s": _least(partial(compute, times))}
    for name, target in targets.items():
        found[name] = {"copy_s": _least(partial(copy, target)), "both_s": _least(partial(both, times, target))}
    return found


def device_rates(job: Job) -> dict[str, Any]:
    """Copies between device and host, and hashing what is in the processor's cache and what is not."""
    size = 1 << 22 if job.options.cpu else 1 << 31
    source = torch.ones(size, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    pageable = torch.empty(size, dtype=torch.uint8, device="cpu").fill_(0)
    calls: dict[str, Callable[[], object]] = {
        "device to pinned": lambda: pinned.copy_(source, non_blocking=True),
        "device to pageable": lambda: pageable.copy_(source),
        "pinned to device": lambda: source.copy_(pinned, non_blocking=True),
        "pageable to device": lambda: source.copy_(pageable),
        "hashing": lambda: _hash(pageable.numpy(), size),
        "hashing in cache": lambda: _hash(pageable.numpy()[:HASHED_AT_ONCE], size),
    }
    return {name: rate(size, _least(call)) for name, call in calls.items()}


def _least(call: Callable[[], object]) -> float:
    """Seconds of the fastest of a few calls."""
    return min(seconds_of(call) for _ in range(REPEATS))


def _hash(data: np.typing.NDArray[np.uint8], size: int) -> None:
    """So many bytes, over and over where there are fewer, in pieces of the size in which a save hashes."""
    hasher = xxhash.xxh3_64()
    for start in range(0, size, HASHED_AT_ONCE):
        start %= data.size
        hasher.update(data[start : start + HASHED_AT_ONCE])


def file_rates(folder: Path, size: int) -> dict[str, Any]:
    """Writing a file and flushing it, and reading it, not from the page cache where there is a disk behind it."""
    block = np.random.default_rng(0).integers(0, 256, _BLOCK, dtype=np.uint8)
    path = folder / f"raw-{os.getpid()}"
    try:
        begin = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for start in range(0, size, _BLOCK):
                file.write(memoryview(block)[: size - start])
            os.fsync(file.fileno())
        written = time.perf_counter() - begin
        drop_cache(path)
        begin = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
        return {"raw write and fsync": rate(size, written), "raw read": rate(size, time.perf_counter() - begin)}
    finally:
        path.unlink(missing_ok=True)


def drop_cache(path: Path) -> None:
    """Let the page cache forget a file that is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
