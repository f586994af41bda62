# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What integrity costs: `python -m benchmarks.integrity`.

One model on two real ranks, in one run: saves with and without checksums in turn, saves that do and don't compare the
copies that ranks hold (of everything, with the strategy `no_shard`), and loads with `verify="full"` and
`verify="header"` in turn, from the page cache and from the disk.  Medians of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch.distributed as dist
from rich.console import Console

import mbridge_fsdp_ckpt
from benchmarks.cache import prepare_cache
from mbridge_fsdp_ckpt.format import payload
from testing.kernels import replace_cuda_only_kernels
from testing.models import Recipe, build
from testing.modules import MEGATRON_MODULES, installed
from testing.ranks import RankPool
from tools.circumstances import circumstances

RESULTS = Path(__file__).parent / "results" / "integrity"
RANKS = 2
LIMITS = {"save": "10%", "save, copies": "none set", "load, cached": "15%", "load, from disk": "15%"}
COPIES: dict[str, Literal["warn", "ignore"]] = {"save, copies compared": "warn", "save, copies ignored": "ignore"}
Times = dict[str, list[float]]


class NoHasher:
    """In place of the hasher, to see what a save takes without."""

    def update(self, data: Any) -> None:
        """Nothing."""

    def result(self) -> str:
        """As long as a checksum."""
        return "xxh3_64:0000000000000000"


def measure(folder: str, recipe: Recipe, repeats: int) -> Times:
    """On every rank: its seconds of each save and load, the first of each kind left out."""
    replace_cuda_only_kernels()
    trainable = build(recipe)
    trainable.step(0)
    arguments: dict[str, Any] = {"model": trainable.model, "optimizer": trainable.optimizer}
    times: Times = {}

    def timed(name: str, action: Any, number: int) -> None:
        dist.barrier()
        begin = time.perf_counter()
        action()
        if number:
            times.setdefault(name, []).append(time.perf_counter() - begin)

    with_sums, without = Path(folder) / "with", Path(folder) / "without"
    for number in range(repeats + 1):
        timed("save, checksums", lambda: mbridge_fsdp_ckpt.save(with_sums, **arguments), number)
        with patch.object(payload, "Hasher", NoHasher):
            timed("save, no checksums", lambda: mbridge_fsdp_ckpt.save(without, **arguments), number)
    for number in range(repeats + 1):
        for verify in ("full", "header"):
            settings = mbridge_fsdp_ckpt.Settings(verify=verify)
            for place in ("cached", "from disk"):
                prepare_cache(with_sums, cached=place == "cached")
                name = f"load, {place}, {verify}"
                timed(name, lambda s=settings: mbridge_fsdp_ckpt.load(with_sums, settings=s, **arguments), number)
    return times


def measure_copies(folder: str, recipe: Recipe, repeats: int) -> Times:
    """On every rank, where all ranks hold everything: its seconds of each save, the first of each kind left out."""
    replace_cuda_only_kernels()
    trainable = build(recipe)
    trainable.step(0)
    times: Times = {}
    for number in range(repeats + 1):
        for name, choice in COPIES.items():
            dist.barrier()
            begin = time.perf_counter()
            mbridge_fsdp_ckpt.save(
                Path(folder) / choice,
                model=trainable.model,
                optimizer=trainable.optimizer,
                settings=mbridge_fsdp_ckpt.Settings(replicas=choice),
            )
            if number:
                times.setdefault(name, []).append(time.perf_counter() - begin)
    return times


def compare(times: list[Times]) -> dict[str, dict[str, float]]:
    """Medians over repeats of the slowest rank, and the overhead."""
    medians = {
        name: statistics.median(map(max, zip(*(rank[name] for rank in times), strict=True))) for name in times[0]
    }
    pairs = {
        "save": ("save, checksums", "save, no checksums"),
        "save, copies": ("save, copies compared", "save, copies ignored"),
        **{f"load, {place}": (f"load, {place}, full", f"load, {place}, header") for place in ("cached", "from disk")},
    }
    return {
        what: {"with": medians[one], "without": medians[other], "overhead": medians[one] / medians[other] - 1}
        for what, (one, other) in pairs.items()
    }


def report(about: dict[str, str], found: dict[str, dict[str, float]], size: int) -> str:
    """A page."""
    lines = [f"# What integrity costs\n\n{__doc__.split(chr(10), 2)[2].strip()}\n"]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    lines += [
        f"- checkpoint: {size / 1e6:.0f} MB\n",
        "| | with, s | without, s | overhead | limit |",
        "| --- " * 5 + "|",
    ]
    for what, row in found.items():
        values = f"{row['with']:.3f} | {row['without']:.3f} | {row['overhead']:+.1%} | {LIMITS[what]}"
        lines.append(f"| {what} | {values} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.integrity", description=__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="of each kind of save and load (default: 15)")
    parser.add_argument("--hidden", type=int, default=512, help="the model's width (default: 512)")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="where checkpoints go")
    arguments = parser.parse_args()
    recipe = Recipe(layers=4, hidden=arguments.hidden, ffn=4 * arguments.hidden, experts=4, vocabulary=64)
    with (
        tempfile.TemporaryDirectory(dir=arguments.scratch) as place,
        RankPool(RANKS, preload=installed(MEGATRON_MODULES), time_limit=3000, nan_memory=False) as pool,
    ):
        folder = Path(place)
        times = pool.run(measure, str(folder), recipe, arguments.repeats)
        copies = pool.run(measure_copies, str(folder), recipe.on(strategy="no_shard"), arguments.repeats)
        times = [{**rank, **of_copies} for rank, of_copies in zip(times, copies, strict=True)]
        size = sum(path.stat().st_size for path in (folder / "with").iterdir())
    about = circumstances(arguments.scratch, repeats=str(arguments.repeats))
    page = report(about, compare(times), size)
    Console(highlight=False).print(page)
    RESULTS.with_suffix(".md").write_text(page)
    RESULTS.with_suffix(".json").write_text(json.dumps({"about": about, "times": times, "size": size}, indent=1) + "\n")


if __name__ == "__main__":
    main()
