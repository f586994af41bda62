# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What it brings that ranks read for each other: `python -m benchmarks.sharing`.

Four real ranks in two layouts, in one run: loads with `share_reads="always"` and `"never"` in turn, from the page cache
of this host, from its disk, and from a storage that is as slow as many hosts find theirs: each rank gets a quarter
of what it gives to all together, and no page cache helps.  Medians of the slowest rank, and the bytes of
payload that all ranks together asked of the storage.  gloo goes over this host's loopback and its few cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch.distributed as dist
from rich.console import Console

import mbridge_fsdp_ckpt
from benchmarks.cache import prepare_cache
from mbridge_fsdp_ckpt.io.reading import FileReader
from testing.kernels import replace_cuda_only_kernels
from testing.models import Recipe, build
from testing.modules import MEGATRON_MODULES, installed
from testing.ranks import RankPool
from tools.circumstances import circumstances

RESULTS = Path(__file__).parent / "results" / "sharing"
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


def measure(folder: str, recipe: Recipe, repeats: int) -> dict[str, dict[str, Any]]:
    """On every rank: its seconds and bytes of each load, the first of each kind left out."""
    replace_cuda_only_kernels()
    trainable = build(recipe)
    trainable.step(0)
    arguments: dict[str, Any] = {"model": trainable.model, "optimizer": trainable.optimizer}
    directory = Path(folder) / "saved"
    mbridge_fsdp_ckpt.save(directory, **arguments)
    found: dict[str, dict[str, Any]] = {}
    for number in range(repeats + 1):
        for storage, rate in STORAGES.items():
            for mode in MODES:
                prepare_cache(directory, cached=storage != "disk")
                settings = mbridge_fsdp_ckpt.Settings(share_reads=mode)
                with _slow(rate) as read:
                    begin = time.perf_counter()
                    mbridge_fsdp_ckpt.load(directory, settings=settings, **arguments)
                    seconds = time.perf_counter() - begin
                dist.barrier()
                if number:
                    row = found.setdefault(f"{storage}, {mode}", {"seconds": [], "bytes": sum(read)})
                    row["seconds"].append(seconds)
    return found


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


def compare(ranks: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """By storage: the slowest rank's median, and all ranks' bytes, without and with sharing."""
    found = {}
    for storage in STORAGES:
        row: dict[str, float] = {}
        for mode in MODES:
            own = [rank[f"{storage}, {mode}"] for rank in ranks]
            row[mode] = statistics.median(map(max, zip(*(one["seconds"] for one in own), strict=True)))
            row[f"{mode}, MB"] = sum(one["bytes"] for one in own) / 1e6
        found[storage] = row
    return found


def report(about: dict[str, str], found: dict[str, dict[str, dict[str, float]]], sizes: dict[str, int]) -> str:
    """A page."""
    lines = [f"# What sharing of reads brings\n\n{__doc__.split(chr(10), 2)[2].strip()}\n"]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    lines += [f"- checkpoint of {layout}: {size / 1e6:.0f} MB" for layout, size in sizes.items()]
    lines += ["", "| layout | storage | never, s | always, s | never, MB read | always, MB read |", "| --- " * 6 + "|"]
    for layout, rows in found.items():
        for storage, row in rows.items():
            seconds = f"{row['never']:.3f} | {row['always']:.3f}"
            lines.append(f"| {layout} | {storage} | {seconds} | {row['never, MB']:.0f} | {row['always, MB']:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharing", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="of each kind of load (default: 5)")
    parser.add_argument("--hidden", type=int, default=512, help="the model's width (default: 512)")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="where checkpoints go")
    arguments = parser.parse_args()
    recipe = Recipe(layers=2, hidden=arguments.hidden, ffn=4 * arguments.hidden, vocabulary=64)
    found, sizes, ranks = {}, {}, {}
    with (
        tempfile.TemporaryDirectory(dir=arguments.scratch) as place,
        RankPool(RANKS, preload=installed(MEGATRON_MODULES), time_limit=3000, nan_memory=False) as pool,
    ):
        for layout, settings in LAYOUTS.items():
            folder = Path(place) / layout.replace(" ", "-")
            ranks[layout] = pool.run(measure, str(folder), recipe.on(**settings), arguments.repeats)
            found[layout] = compare(ranks[layout])
            sizes[layout] = sum(path.stat().st_size for path in (folder / "saved").iterdir())
    about = circumstances(arguments.scratch, repeats=str(arguments.repeats))
    page = report(about, found, sizes)
    Console(highlight=False).print(page)
    RESULTS.with_suffix(".md").write_text(page)
    RESULTS.with_suffix(".json").write_text(
        json.dumps({"about": about, "ranks": ranks, "sizes": sizes}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
