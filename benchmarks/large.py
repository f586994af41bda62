# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of a few real ranks share: their models, how they are run, where results go."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from mbridge_fsdp_ckpt.upstream_fixes import corrections
from testing.kernels import replace_cuda_only_kernels
from testing.models import Recipe, Trainable, build
from testing.modules import MEGATRON_MODULES, installed
from testing.ranks import RankPool
from tools.circumstances import circumstances


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

Numbers = dict[str, list[float]]
"""What one rank measured, by name; one number a turn."""

Compared = dict[str, Any]
"""What all ranks' numbers come to, for a model."""

_RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Benchmark[R]:
    """One of them.

    Args:
        name: `python -m benchmarks.NAME` runs it; its results are called so, too.
        title: Of its page.
        about: What is measured: the docstring of its module, whose first line the title stands for.
        measure: Called on every rank with a folder, a model and how many turns to take.
        compare: What is made of what all ranks return for a model.
        section: The lines about a model on the page, but for its heading.
        draw: Draws what is compared, by model.
        models: Those of a run that names none.
        prepare: Called before a model is measured, with its folder: what its ranks do first, in processes that end.
    """

    name: str
    title: str
    about: str
    measure: Callable[[str, Recipe, int], R]
    compare: Callable[[list[R]], Compared]
    section: Callable[[Compared], list[str]]
    draw: Callable[[Mapping[str, Compared], Path], None]
    models: Sequence[str] = tuple(MODELS)
    prepare: Callable[[RankPool, str, Recipe], None] | None = None

    def main(self) -> None:
        """Read the command line, measure, print, write; what was measured before a model fails is written."""
        arguments = self._arguments()
        about = circumstances(arguments.scratch, runs=str(arguments.runs))
        ranks: dict[str, list[R]] = {}
        for model in arguments.models:
            ranks[model] = self._run(arguments, model)
            if not arguments.dry:
                self._write(arguments.results, about, ranks)
        Console(highlight=False).print(self.page(about, self._compared(ranks)))

    def _write(self, results: Path, about: Mapping[str, str], ranks: Mapping[str, list[R]]) -> None:
        results.mkdir(parents=True, exist_ok=True)
        file, found = results / self.name, self._compared(ranks)
        file.with_suffix(".md").write_text(self.page(about, found))
        file.with_suffix(".json").write_text(json.dumps({"about": about, "ranks": ranks}, indent=1) + "\n")
        self.draw(found, file.with_suffix(".png"))

    def _compared(self, ranks: Mapping[str, list[R]]) -> dict[str, Compared]:
        return {model: self.compare(measured) for model, measured in ranks.items()}

    def _arguments(self) -> argparse.Namespace:
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{self.name}", description=self.about)
        parser.add_argument("--models", nargs="+", choices=MODELS, help=f"default: {', '.join(self.models)}")
        parser.add_argument("--runs", "--repeats", type=int, help="of each kind (default: 5; with --quick 1)")
        parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="where files go")
        parser.add_argument("--results", type=Path, help="folder of the results (default: benchmarks/results)")
        parser.add_argument("--quick", action="store_true", help="two small models, once; results in out/benchmarks")
        parser.add_argument("--dry", action="store_true", help="write no results")
        arguments = parser.parse_args()
        arguments.models = arguments.models or (QUICK if arguments.quick else self.models)
        arguments.runs = arguments.runs or (1 if arguments.quick else 5)
        arguments.results = arguments.results or (Path("out/benchmarks") if arguments.quick else _RESULTS)
        return arguments

    def _run(self, arguments: argparse.Namespace, name: str) -> list[R]:
        """What each rank returns for a model, in processes of their own."""
        model = MODELS[name]
        with (
            tempfile.TemporaryDirectory(dir=arguments.scratch) as place,
            RankPool(model.ranks, preload=installed(MEGATRON_MODULES), time_limit=3000, nan_memory=False) as pool,
        ):
            if self.prepare is not None:
                self.prepare(pool, place, model.recipe)
            return pool.run(self.measure, place, model.recipe, arguments.runs)

    def page(self, about: Mapping[str, str], found: Mapping[str, Compared]) -> str:
        """The page: what was measured, with what it ran, and a section for each model."""
        lines = [f"# {self.title}\n\n{self.about.split(chr(10), 2)[2].strip()}\n"]
        lines += [f"![{self.title}, as a picture]({self.name}.png)\n"]
        lines += [f"- {name}: {value}" for name, value in about.items()]
        for model, one in found.items():
            lines += [f"\n## {model}\n", *self.section(one)]
        return "\n".join(lines) + "\n"


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


def slowest(ranks: Sequence[Numbers]) -> dict[str, float]:
    """The median over turns of the slowest rank's, by name."""
    return {
        name: statistics.median(map(max, zip(*(numbers[name] for numbers in ranks), strict=True))) for name in ranks[0]
    }
