# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What it brings that ranks read for each other: `python -m benchmarks.sharing`.

Two and four real ranks that hold copies, in one run: loads with `share_reads="always"` and `"never"` in turn, from the
page cache of this host, from its disk, and from a simulated store that gives each client so much and all of them
together so much, which no page cache helps.  Medians of the slowest rank, and the bytes of payload that all ranks
together asked of the storage.  gloo goes over this host's loopback and its few cores.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch.distributed as dist

import mbridge_fsdp_ckpt
from benchmarks.harness import Benchmark, Found, Numbers, Say, in_turns, ranks_of, slowest, table, timed
from benchmarks.memory import prepare_cache
from mbridge_fsdp_ckpt.io.reading import FileReader
from testing.kernels import replace_cuda_only_kernels
from testing.models import Recipe, build

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 ranks, no_shard": (2, {"strategy": "no_shard"}),
    "4 ranks, HSDP 2 x 2": (4, {"instances": 2}),
    "4 ranks, no_shard": (4, {"strategy": "no_shard"}),
}
"""Ranks, and how they are laid out: copies of everything are on both, on pairs, on all four."""


@dataclass(frozen=True)
class Store:
    """A simulated store.

    Args:
        in_all: MB/s that it gives to all clients together.
        each: MB/s that it gives to one of them.
    """

    in_all: int
    each: int

    def seconds(self, count: int, clients: int) -> float:
        """How long so many bytes take one of so many clients that read at the same time."""
        return count / 1e6 / min(self.each, self.in_all / clients)


STORAGES: dict[str, Store | None] = {"page cache": None, "disk": None} | {
    f"{store.in_all} MB/s in all, {store.each} a client": store
    for store in (Store(4000, 500), Store(800, 500), Store(800, 200), Store(400, 200), Store(100, 200))
}

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
        for storage, store in STORAGES.items():
            for mode in MODES:
                prepare_cache(directory, cached=storage != "disk")
                settings = mbridge_fsdp_ckpt.Settings(share_reads=mode)
                with _slow(store) as read:
                    seconds = timed(partial(mbridge_fsdp_ckpt.load, directory, settings=settings, **arguments))
                yield f"{storage}, {mode}", seconds
                yield f"{storage}, {mode}: bytes", float(sum(read))

    return in_turns(loads, repeats)


@contextmanager
def _slow(store: Store | None) -> Iterator[list[int]]:
    """Count what this rank reads, and let it take as long as `store` would."""
    read: list[int] = []
    original, one_at_a_time = FileReader.read, threading.Lock()

    def reading(file: FileReader, memory: memoryview, offset: int) -> int:
        with one_at_a_time:
            started = time.perf_counter()
            count = original(file, memory, offset)
            read.append(count)
            if store is not None:
                wanted = store.seconds(count, dist.get_world_size())
                time.sleep(max(0.0, wanted - (time.perf_counter() - started)))
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
    with ranks_of(max(count for count, _ in LAYOUTS.values()), arguments.scratch) as (pool, place):
        for layout, (count, settings) in LAYOUTS.items():
            say(layout)
            folder = place / layout.replace(" ", "-").replace(",", "")
            case = measure, str(folder), recipe.on(**settings), arguments.repeats
            ranks[layout] = pool.run(*case, ranks=count)
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
