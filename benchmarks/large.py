"""What the benchmarks of two real ranks share: their models, how they are run, where results go."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from mbridge_fsdp_ckpt.testing.models import Recipe
from mbridge_fsdp_ckpt.testing.modules import MEGATRON_MODULES, installed
from mbridge_fsdp_ckpt.testing.ranks import RankPool
from tools.circumstances import circumstances

RANKS = 2
MODELS = {
    "0.43 GB": Recipe(layers=2, hidden=1024, ffn=4096),
    "1.7 GB": Recipe(layers=2, hidden=2048, ffn=8192),
    "4 GB": Recipe(layers=5, hidden=2048, ffn=8192),
    "64 experts x 4 layers": Recipe(layers=4, experts=64, hidden=64, ffn=64),
}
"""By gigabytes of weights and moments, in fp32: few tensors, large ones; and many small ones."""

Numbers = dict[str, list[float]]
"""What one rank measured, by name; one number a turn."""

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
        models: Those of a run that names none.
    """

    name: str
    title: str
    about: str
    measure: Callable[[str, Recipe, int], R]
    compare: Callable[[list[R]], dict[str, Any]]
    section: Callable[[dict[str, Any]], list[str]]
    models: Sequence[str] = tuple(MODELS)

    def main(self) -> None:
        """Read the command line, measure, print, write."""
        arguments = self._parser().parse_args()
        ranks = {model: self._run(arguments, model) for model in arguments.models}
        about = circumstances(arguments.scratch, runs=str(arguments.runs))
        page = self.page(about, {model: self.compare(measured) for model, measured in ranks.items()})
        Console(highlight=False).print(page)
        if not arguments.dry:
            (_RESULTS / f"{self.name}.md").write_text(page)
            (_RESULTS / f"{self.name}.json").write_text(json.dumps({"about": about, "ranks": ranks}, indent=1) + "\n")

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{self.name}", description=self.about)
        parser.add_argument(
            "--models", nargs="+", choices=MODELS, default=list(self.models), help=f"default: {', '.join(self.models)}"
        )
        parser.add_argument("--runs", type=int, default=5, help="of each kind (default: 5)")
        parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="where files go")
        parser.add_argument("--dry", action="store_true", help="write no page")
        return parser

    def _run(self, arguments: argparse.Namespace, model: str) -> list[R]:
        """What each rank returns for a model, in processes of their own."""
        with (
            tempfile.TemporaryDirectory(dir=arguments.scratch) as place,
            RankPool(RANKS, preload=installed(MEGATRON_MODULES), time_limit=3000) as pool,
        ):
            return pool.run(self.measure, place, MODELS[model], arguments.runs)

    def page(self, about: Mapping[str, str], found: Mapping[str, dict[str, Any]]) -> str:
        """The page: what was measured, with what it ran, and a section for each model."""
        lines = [f"# {self.title}\n\n{self.about.split(chr(10), 2)[2].strip()}\n"]
        lines += [f"- {name}: {value}" for name, value in about.items()]
        for model, one in found.items():
            lines += [f"\n## {model}\n", *self.section(one)]
        return "\n".join(lines) + "\n"


def slowest(ranks: Sequence[Numbers]) -> dict[str, float]:
    """The median over turns of the slowest rank's, by name."""
    return {
        name: statistics.median(map(max, zip(*(numbers[name] for numbers in ranks), strict=True))) for name in ranks[0]
    }
