# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What it brings that ranks read for each other: `python -m benchmarks.sharing`.

Four real ranks in two layouts, in one run: loads with `share_reads="always"` and `"never"` in turn, from the page cache
of this host, from its disk, and from a storage that is as slow as many hosts find theirs: each rank gets a quarter
of what it gives to all together, and no page cache helps.  Medians of the slowest rank, and the bytes of
payload that all ranks together asked of the storage.  gloo goes over this host's loopback and its few cores.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import mbridge_fsdp_ckpt
from benchmarks.harness import Benchmark, Found, Numbers, Say, in_turns, ranks_of, slowest, table, timed
from benchmarks.memory import prepare_cache
from mbridge_fsdp_ckpt.io.reading import FileReader
from testing.kernels import replace_cuda_only_kernels
from testing.models import Recipe, build

RANKS = 4
LAYOUTS: dict[str, dict[str, Any]] = {"HSDP 2 x 2": {"instances": 2}, "no_shard": {"strategy": "no_shard"}}
STORAGES: dict[str, int | None] = {
    "page cache": None,
    "disk": None,
    "1600 MB/s": 1600,
    "400 MB/s": 400,
    "100 MB/s": 100,
}
"""Megabytes a second that all ranks get together; None for what this host gives."""

MODES: tuple[Literal["never", "always"], ...] = ("never", "always")


def measure(folder: str, recipe: Recipe, repeats: int) -> Numbers:
    """On every rank: its seconds and bytes of each load."""
    replace_cuda_only_kernels()
    trainable = build(recipe)
    trainable.step(0)
    arguments: dict[str, Any] = {"model": trainable.model, "optimizer": trainable.optimizer}
    directory = Path(folder) / "saved"
    mbridge_fsdp_ckpt.save(directory, **arguments)

    def loads() -> Iterator[tuple[str, float]]:
        for storage, rate in STORAGES.items():
            for mode in MODES:
                prepare_cache(directory, cached=storage != "disk")
                settings = mbridge_fsdp_ckpt.Settings(share_reads=mode)
                with _slow(rate) as read:
                    seconds = timed(partial(mbridge_fsdp_ckpt.load, directory, settings=settings, **arguments))
                yield f"{storage}, {mode}", seconds
                yield f"{storage}, {mode}: bytes", float(sum(read))

    return in_turns(loads, repeats)


@contextmanager
def _slow(rate: int | None) -> Iterator[list[int]]:
    """Count what this rank reads; a rank gets its part of so many MB/s."""
    read: list[int] = []
    original, one_at_a_time = FileReader.read, threading.Lock()

    def reading(file: FileReader, memory: memoryview, offset: int) -> int:
        with one_at_a_time:
            started = time.perf_counter()
            count = original(file, memory, offset)
            read.append(count)
            if rate is not None:
                time.sleep(max(0.0, count * RANKS / rate / 1e6 - (time.perf_counter() - started)))
            return count

    with patch.object(FileReader, "read", reading):
        yield read


def compare(ranks: list[Numbers]) -> dict[str, dict[str, float]]:
    """By storage: the slowest rank's median, and all ranks' bytes, without and with sharing."""
    medians = slowest(ranks)
    return {
        storage: {mode: medians[f"{storage}, {mode}"] for mode in MODES}
        | {f"{mode}, MB": sum(rank[f"{storage}, {mode}: bytes"][-1] for rank in ranks) / 1e6 for mode in MODES}
        for storage in STORAGES
    }


def _body(found: Found) -> list[str]:
    sizes = [f"- checkpoint of {layout}: {size / 1e6:.0f} MB" for layout, size in found["sizes"].items()]
    rows = (
        [layout, storage, *(f"{row[mode]:.3f}" for mode in MODES), *(f"{row[f'{mode}, MB']:.0f}" for mode in MODES)]
        for layout, ranks in found["ranks"].items()
        for storage, row in compare(ranks).items()
    )
    head = ["layout", "storage", "never, s", "always, s", "never, MB read", "always, MB read"]
    return [*sizes, "", *table(head, rows)]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=int, default=512, help="the model's width (default: 512)")


def _measure(arguments: argparse.Namespace, say: Say) -> Iterator[Found]:
    recipe = Recipe(layers=2, hidden=arguments.hidden, ffn=4 * arguments.hidden)
    sizes: dict[str, int] = {}
    ranks: dict[str, list[Numbers]] = {}
    with ranks_of(RANKS, arguments.scratch) as (pool, place):
        for layout, settings in LAYOUTS.items():
            say(layout)
            folder = place / layout.replace(" ", "-")
            ranks[layout] = pool.run(measure, str(folder), recipe.on(**settings), arguments.repeats)
            sizes[layout] = sum(path.stat().st_size for path in (folder / "saved").iterdir())
            yield {"ranks": ranks, "sizes": sizes}


BENCHMARK = Benchmark(
    command="python -m benchmarks.sharing",
    name="sharing",
    title="What sharing of reads brings",
    about=__doc__,
    measure=_measure,
    body=_body,
    options=_options,
)

if __name__ == "__main__":
    BENCHMARK.main()
