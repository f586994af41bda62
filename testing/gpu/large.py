# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A large save to memory and to disk, and its load: where the seconds go, beside what the machine can do."""

from __future__ import annotations

import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.io import host_bytes
from mbridge_fsdp_ckpt.io.checksums import Hasher
from mbridge_fsdp_ckpt.io.direct_writer import DirectWriter
from mbridge_fsdp_ckpt.io.prefetch import Prefetch
from mbridge_fsdp_ckpt.loading.destinations import Destination
from mbridge_fsdp_ckpt.patching import Patches
from mbridge_fsdp_ckpt.settings import Settings
from testing.gpu.job import Job, rate, seconds_of
from testing.gpu.rates import device_rates, drop_cache, file_rates
from testing.gpu.state import clear, digests, tensors
from testing.models import VOCABULARY, Recipe, Trainable, build

BYTES_PER_ELEMENT = 12
"""Of state: the main weight and two moments, in fp32."""

_WIDTHS = (4_000_000_000, 4096, 11008), (200_000_000, 1024, 2816), (0, 128, 256)  # bytes from which on, hidden, ffn
RAW_BYTES = 4_000_000_000
_DEVICE_SHARE = 3.0  # of the state, what the device holds while new slots are loaded: weights, gradients, slots twice
_FOLDER_SHARE = 1.2
_MARGIN_S = 45.0


def recipe_of(size: int) -> Recipe:
    """A dense model with at least so many bytes of state."""
    hidden, ffn = next((hidden, ffn) for least, hidden, ffn in _WIDTHS if size >= least)
    layer = 4 * hidden * hidden + 3 * hidden * ffn
    layers = math.ceil((size / BYTES_PER_ELEMENT - 2 * VOCABULARY * hidden) / layer)
    return Recipe(layers=max(1, layers), hidden=hidden, ffn=ffn)


def large(job: Job) -> dict[str, Any]:
    """Build the model, train a step, then save and load it in each place that has room."""
    ranks, size = dist.get_world_size(), job.options.size
    free = torch.cuda.mem_get_info()[0]
    needed = int(_DEVICE_SHARE * size / ranks)
    if job.refused("large", f"needs {needed:,} bytes on the device, {free:,} are free" if needed > free else None):
        return {}
    found: dict[str, Any] = {"raw": device_rates(job)}
    run = build(recipe_of(size))
    run.step(0)
    torch.cuda.empty_cache()
    saved = digests(run)
    for name, folder in (("memory", job.options.memory), ("disk", job.options.disk)):
        what, place = f"large, {name}", Path(folder)
        raw = _raw(job, what, place)
        if raw is not None:
            found[name] = raw | (job.attempt(what, partial(_saved_and_loaded, job, what, run, place, saved)) or {})
    return found


def _raw(job: Job, what: str, folder: Path) -> dict[str, Any] | None:
    """Rates of files there; None where there is no room, or no time left for what they promise."""
    size, free = job.options.size, shutil.disk_usage(folder).free
    needed = int(_FOLDER_SHARE * size)
    if job.refused(what, f"needs {needed:,} bytes in {folder}, {free:,} are free" if needed > free else None):
        return None
    own = min(RAW_BYTES, size) // dist.get_world_size()
    if job.refused(what, None if job.left > _MARGIN_S else f"{job.left:.0f} seconds were left"):
        return None
    raw = file_rates(folder, own)
    writing, reading = (size / dist.get_world_size() / own * part["seconds"] for part in raw.values())
    wanted = 1.5 * (writing + 2 * reading) + _MARGIN_S
    late = f"would take {wanted:.0f} s at the raw rate of {folder}, {job.left:.0f} were left"
    return None if job.refused(what, late if wanted > job.left else None) else raw


def _saved_and_loaded(job: Job, what: str, run: Trainable, folder: Path, saved: dict[str, str]) -> dict[str, Any]:
    """Both, with the time of their parts on rank 0; in between all of the model's state is set to zero."""
    directory = folder / "iter_0000200"
    settings = Settings(time_limit=60.0, storage_limit=max(job.left, 60.0))
    with _parts() as of_save:
        save = seconds_of(
            lambda: mbridge_fsdp_ckpt.save(directory, model=run.model, optimizer=run.optimizer, settings=settings)
        )
    size = sum(path.stat().st_size for path in directory.iterdir())
    clear(run)
    job.expect(f"{what}: all is zero before the load", not any(bool(tensor.any()) for _, tensor in tensors(run)))
    for path in directory.iterdir():
        drop_cache(path)
    with _parts() as of_load:
        load = seconds_of(
            lambda: mbridge_fsdp_ckpt.load(directory, model=run.model, optimizer=run.optimizer, settings=settings)
        )
    job.expect(f"{what}: what was loaded is what was saved", digests(run) == saved)
    if dist.get_rank() == 0:  # all have answered: none is reading
        shutil.rmtree(directory)
    return {"save": _figures(size, save, of_save), "load": _figures(size, load, of_load)}


@dataclass(frozen=True, slots=True)
class Parts:
    """What the parts of a call took on this rank: seconds and bytes of each."""

    seconds: Counter[str] = field(default_factory=Counter)
    sizes: Counter[str] = field(default_factory=Counter)

    def timed(self, part: str, function: Callable[..., Any], size_of: Callable[..., int]) -> Callable[..., Any]:
        """`function`, adding to a part: its seconds, and what `size_of` makes of its result and its arguments."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[part] += time.perf_counter() - begin  # type: ignore[assignment]
            self.sizes[part] += size_of(result, *args)
            return result

        return call


@contextmanager
def _parts() -> Iterator[Parts]:
    """Time what a save and a load are made of, as long as the block runs."""
    parts, begin = Parts(), Prefetch.begin

    def timed_begin(self: Any, *args: Any) -> Callable[..., int] | None:
        fill = begin(self, *args)
        return None if fill is None else parts.timed("reading", fill, lambda count, *_: count)

    calls = (
        (host_bytes, "host_bytes", "device to host", lambda result, *_: result.nbytes),
        (Hasher, "update", "hashing", lambda _, __, data: memoryview(data).nbytes),
        (DirectWriter, "write", "writing", lambda _, __, block: memoryview(block).nbytes),
        (DirectWriter, "finish", "writing", lambda *_: 0),
        (Destination, "take", "host to device", lambda count, own, *_: count * own.memory.itemsize),
    )
    with Patches() as patches:
        for owner, name, part, size_of in calls:
            patches.set(owner, name, parts.timed(part, getattr(owner, name), size_of))
        patches.set(Prefetch, "begin", timed_begin)
        yield parts


def _figures(size: int, seconds: float, parts: Parts) -> dict[str, Any]:
    each = {part: rate(parts.sizes[part], parts.seconds[part]) for part in parts.seconds}
    rest = seconds - sum(parts.seconds.values())
    return {**rate(size, seconds), "parts": each, "rest_s": round(rest, 4)}
