# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`make demo`: the main job in a minute, on CPU ranks, without Transformer Engine or Megatron-Bridge.

A Mixture-of-Experts model under real Megatron-FSDP, its optimizer offloaded to the host, is trained, saved in the
middle, resumed on the same ranks and in another layout.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.upstream_fixes import corrections
from testing.collectives import count_collectives
from testing.kernels import replace_cuda_only_kernels
from testing.models import Recipe, Trainable, build
from testing.modules import MEGATRON_MODULES, installed
from testing.ranks import RankPool

MODEL = Recipe(layers=2, experts=8, offload=1.0)
OTHER_LAYOUT = MODEL.on(tensor=2, expert=2, offload=0.5)
STEPS, SAVED_AFTER = 6, 3


def _model(recipe: Recipe, seed: int) -> Trainable:
    replace_cuda_only_kernels()
    corrections.apply(__name__)
    return build(recipe, seed)


def uninterrupted(directory: str) -> dict[str, Any]:
    """Train all steps, and save on the way."""
    run = _model(MODEL, seed=1)
    losses = [run.step(number) for number in range(SAVED_AFTER)]
    start = time.perf_counter()
    with count_collectives() as counts:
        mbridge_fsdp_ckpt.save(directory, model=run.model, optimizer=run.optimizer, values={"iteration": SAVED_AFTER})
    seconds = time.perf_counter() - start
    losses += [run.step(number) for number in range(SAVED_AFTER, STEPS)]
    return {"losses": losses, "seconds": seconds, "collectives": counts.total}


def resumed(directory: str, recipe: Recipe) -> dict[str, Any]:
    """Load into a model that was initialised otherwise, and train the rest."""
    run = _model(recipe, seed=2)
    start = time.perf_counter()
    mbridge_fsdp_ckpt.load(directory, model=run.model, optimizer=run.optimizer)
    seconds = time.perf_counter() - start
    return {"losses": [run.step(number) for number in range(SAVED_AFTER, STEPS)], "seconds": seconds}


def main() -> int:
    """Run the demo; 0 where every promise held."""
    console = Console()
    console.print("A Mixture-of-Experts model under Megatron-FSDP, optimizer offloaded to the host (offload 1.0).")
    modules = installed(MEGATRON_MODULES)
    with tempfile.TemporaryDirectory() as folder, RankPool(4, preload=modules) as pool:
        place = str(Path(folder) / "iter_0000003")
        whole = pool.run(uninterrupted, place, ranks=2)[0]
        again = pool.run(resumed, place, MODEL, ranks=2)[0]
        other = pool.run(resumed, place, OTHER_LAYOUT, ranks=4)[0]
        size = sum(path.stat().st_size for path in Path(place).iterdir())
    console.print(_table(whole["losses"][SAVED_AFTER:], again["losses"], other["losses"]))
    console.print(
        f"Saved {size / 1e6:.1f} MB in {whole['seconds']:.2f} s with {whole['collectives']} collectives; "
        f"loaded in {again['seconds']:.2f} s, in the other layout in {other['seconds']:.2f} s."
    )
    exact = again["losses"] == whole["losses"][SAVED_AFTER:]
    near = all(abs(a - b) < 1e-2 for a, b in zip(other["losses"], whole["losses"][SAVED_AFTER:], strict=True))
    console.print(f"Same layout, to the last digit: {_decision(exact)}")
    console.print(f"Other layout, the same training up to rounding: {_decision(near)}")
    return 0 if exact and near and whole["collectives"] == 0 else 1


def _table(*columns: list[float]) -> Table:
    table = Table(title=f"Loss after the checkpoint at step {SAVED_AFTER}")
    for heading in ("step", "uninterrupted\n2 ranks", "resumed\n2 ranks", "resumed, 4 ranks\nTP 2, EP 2, offload 0.5"):
        table.add_column(heading, justify="right")
    for number, losses in enumerate(zip(*columns, strict=True), SAVED_AFTER + 1):
        table.add_row(str(number), *(f"{loss:.9f}" for loss in losses))
    return table


def _decision(held: bool) -> str:
    return "[green]yes[/green]" if held else "[red]NO[/red]"


if __name__ == "__main__":
    sys.exit(main())
