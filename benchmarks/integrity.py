# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What integrity costs: `python -m benchmarks.integrity`.

One model on two real ranks, in one run: saves with and without checksums in turn, saves that do and don't compare the
copies that ranks hold (of everything, with the strategy `no_shard`), and loads with `verify="full"` and
`verify="header"` in turn, from the page cache and from the disk.  Medians of the slowest rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import mbridge_fsdp_ckpt
from benchmarks.harness import Benchmark, Found, Numbers, Say, in_turns, ranks_of, slowest, table, timed
from benchmarks.memory import prepare_cache
from mbridge_fsdp_ckpt.format import payload
from testing.kernels import replace_cuda_only_kernels
from testing.models import Recipe, build

RANKS = 2
LIMITS = {"save": "10%", "save, copies": "none set", "load, cached": "15%", "load, from disk": "15%"}
VERIFY: tuple[Literal["full", "header"], ...] = ("full", "header")
COPIES: dict[str, Literal["warn", "ignore"]] = {"save, copies compared": "warn", "save, copies ignored": "ignore"}


class NoHasher:
    """In place of the hasher, to see what a save takes without."""

    def update(self, data: Any) -> None:
        """Nothing."""

    def result(self) -> str:
        """As long as a checksum."""
        return "xxh3_64:0000000000000000"


def measure(folder: str, recipe: Recipe, repeats: int) -> Numbers:
    """On every rank: its seconds of each save and load."""
    whole = _trained(recipe)
    with_sums, without = Path(folder) / "with", Path(folder) / "without"

    def saves() -> Iterator[tuple[str, float]]:
        yield "save, checksums", timed(lambda: mbridge_fsdp_ckpt.save(with_sums, **whole))
        with patch.object(payload, "Hasher", NoHasher):
            yield "save, no checksums", timed(lambda: mbridge_fsdp_ckpt.save(without, **whole))

    def loads() -> Iterator[tuple[str, float]]:
        for verify in VERIFY:
            settings = mbridge_fsdp_ckpt.Settings(verify=verify)
            for place in ("cached", "from disk"):
                prepare_cache(with_sums, cached=place == "cached")
                load = partial(mbridge_fsdp_ckpt.load, with_sums, settings=settings, **whole)
                yield f"load, {place}, {verify}", timed(load)

    return in_turns(saves, repeats) | in_turns(loads, repeats)


def measure_copies(folder: str, recipe: Recipe, repeats: int) -> Numbers:
    """On every rank, where all ranks hold everything: its seconds of each save."""
    whole = _trained(recipe)

    def saves() -> Iterator[tuple[str, float]]:
        for name, choice in COPIES.items():
            settings = mbridge_fsdp_ckpt.Settings(replicas=choice)
            yield name, timed(partial(mbridge_fsdp_ckpt.save, Path(folder) / choice, settings=settings, **whole))

    return in_turns(saves, repeats)


def _trained(recipe: Recipe) -> dict[str, Any]:
    """A model and its optimizer after a step."""
    replace_cuda_only_kernels()
    trainable = build(recipe)
    trainable.step(0)
    return {"model": trainable.model, "optimizer": trainable.optimizer}


def compare(ranks: list[Numbers]) -> dict[str, dict[str, float]]:
    """Medians over repeats of the slowest rank, and the overhead."""
    medians = slowest(ranks)
    pairs = {
        "save": ("save, checksums", "save, no checksums"),
        "save, copies": ("save, copies compared", "save, copies ignored"),
        **{f"load, {place}": (f"load, {place}, full", f"load, {place}, header") for place in ("cached", "from disk")},
    }
    return {
        what: {"with": medians[one], "without": medians[other], "overhead": medians[one] / medians[other] - 1}
        for what, (one, other) in pairs.items()
    }


def _body(found: Found) -> list[str]:
    rows = (
        [what, f"{row['with']:.3f}", f"{row['without']:.3f}", f"{row['overhead']:+.1%}", LIMITS[what]]
        for what, row in compare(found["times"]).items()
    )
    head = ["", "with, s", "without, s", "overhead", "limit"]
    return [f"A checkpoint of {found['size'] / 1e6:.0f} MB.\n", *table(head, rows)]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=int, default=512, help="the model's width (default: 512)")


def _measure(arguments: argparse.Namespace, say: Say) -> Iterator[Found]:
    recipe = Recipe(layers=4, hidden=arguments.hidden, ffn=4 * arguments.hidden, experts=4)
    with ranks_of(RANKS, arguments.scratch) as (pool, folder):
        times = pool.run(measure, str(folder), recipe, arguments.repeats)
        copies = pool.run(measure_copies, str(folder), recipe.on(strategy="no_shard"), arguments.repeats)
        size = sum(path.stat().st_size for path in (folder / "with").iterdir())
    yield {"times": [one | of_copies for one, of_copies in zip(times, copies, strict=True)], "size": size}


BENCHMARK = Benchmark(
    command="python -m benchmarks.integrity",
    name="integrity",
    title="What integrity costs",
    about=__doc__,
    measure=_measure,
    body=_body,
    options=_options,
    repeats=15,
)

if __name__ == "__main__":
    BENCHMARK.main()
