# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of a few real ranks and of models by name share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import Benchmark, Found, Say, ranks_of
from mbridge_fsdp_ckpt.upstream_fixes import corrections
from testing.kernels import replace_cuda_only_kernels
from testing.models import Recipe, Trainable, build
from testing.ranks import RankPool


@dataclass(frozen=True, slots=True)
class Model:
    """What is saved, and by how many.

    Args:
        recipe: Its size and its optimizer.
        ranks: Processes that hold a part of it each.
    """

    recipe: Recipe
    ranks: int = 2


_SMALL, _MEDIUM = Recipe(layers=2, hidden=1024, ffn=4096), Recipe(layers=2, hidden=2048, ffn=8192)
_MANY = Recipe(layers=4, experts=64, hidden=64, ffn=64)
MODELS = {
    "0.43 GB": Model(_SMALL),
    "0.43 GB, 4 ranks": Model(_SMALL, ranks=4),
    "0.43 GB, offloaded": Model(_SMALL.on(offload=1.0)),
    "1.7 GB": Model(_MEDIUM),
    "1.7 GB, 4 ranks": Model(_MEDIUM, ranks=4),
    "4 GB": Model(_MEDIUM.on(layers=5)),
    "64 experts x 4 layers": Model(_MANY),
    "64 experts x 8 layers": Model(_MANY.on(layers=8)),
    "128 experts x 12 layers": Model(_MANY.on(layers=12, experts=128)),
}
"""By gigabytes of weights and moments, in fp32: few tensors, large ones; and many small ones.  On two ranks, unless the
name says so; offloaded: its optimizer is Megatron's HybridDeviceOptimizer, all of it on the host."""

QUICK = ("0.43 GB", "64 experts x 4 layers")
"""Of a quick look."""

Compared = dict[str, Any]
"""What all ranks' numbers come to, for a model."""


@dataclass(frozen=True, slots=True)
class OfModels[R]:
    """What is measured of each model.

    Args:
        measure: Called on every rank with a folder, a model and how many turns to take.
        compare: What is made of what all ranks return for a model.
        section: The lines about a model on the page, but for its heading.
        draw: Draws what is compared, by model.
        models: Those of a run that names none.
        prepare: Called before a model is measured, with its folder: what its ranks do first, in processes that end.
    """

    measure: Callable[[str, Recipe, int], R]
    compare: Callable[[list[R]], Compared]
    section: Callable[[Compared], list[str]]
    draw: Callable[[Mapping[str, Compared], Path], None]
    models: Sequence[str] = tuple(MODELS)
    prepare: Callable[[RankPool, str, Recipe], None] | None = None

    def benchmark(self, name: str, title: str, about: str | None) -> Benchmark:
        """As one: `python -m benchmarks.NAME` runs it."""
        return Benchmark(
            command=f"python -m benchmarks.{name}",
            name=name,
            title=title,
            about=about,
            measure=self._measured,
            body=lambda found: self._body(self._compared(found)),
            draw=lambda found, path: self.draw(self._compared(found), path),
            options=self._options,
            quick=True,
        )

    def _options(self, parser: argparse.ArgumentParser) -> None:
        usual = f"default: {', '.join(self.models)}; with --quick {', '.join(QUICK)}"
        parser.add_argument("--models", nargs="+", choices=MODELS, help=usual)

    def _measured(self, arguments: argparse.Namespace, say: Say) -> Iterator[Found]:
        """What each rank returns, by model, each in processes of their own."""
        ranks: dict[str, list[R]] = {}
        for name in arguments.models or (QUICK if arguments.quick else self.models):
            say(name)
            model = MODELS[name]
            with ranks_of(model.ranks, arguments.scratch) as (pool, folder):
                if self.prepare is not None:
                    self.prepare(pool, str(folder), model.recipe)
                ranks[name] = pool.run(self.measure, str(folder), model.recipe, arguments.repeats)
            yield {"ranks": ranks}

    def _compared(self, found: Found) -> dict[str, Compared]:
        return {model: self.compare(measured) for model, measured in found["ranks"].items()}

    def _body(self, compared: Mapping[str, Compared]) -> list[str]:
        return [line for model, one in compared.items() for line in (f"\n## {model}\n", *self.section(one))]


def untrained(recipe: Recipe) -> Trainable:
    """A model, on this rank; of a Megatron-Core that is corrected as plug-ins do: offloaded optimizers cannot step."""
    replace_cuda_only_kernels()
    corrections.apply(__name__)
    return build(recipe)


class Expected:
    """What a save has to leave on the disk, or its time says nothing.

    Args:
        size: Bytes that this rank saves.
    """

    def __init__(self, size: int) -> None:
        everybody = torch.tensor(size)
        dist.all_reduce(everybody)
        self._size = int(everybody)

    def check(self, place: Path) -> None:
        """Of rank 0, once it is committed.

        Raises:
            RuntimeError: There is less.
        """
        found = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        if dist.get_rank() == 0 and found < self._size:
            raise RuntimeError(f"{place} has {found:,} bytes, of {self._size:,}")
