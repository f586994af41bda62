# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Makes the golden checkpoints of the versions that are installed:  [STACK=NAME] python -m tests.golden.make

Those of other versions are left as they are: nothing can write them any more.  See README.md.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mbridge_fsdp_ckpt.format.schema import VERSION
from testing.modules import BRIDGE_MODULES, MEGATRON_MODULES, installed, is_installed
from testing.ranks import RankPool
from tests.bridge.training import Run, train
from tests.golden import cases
from tests.golden.archive import SUFFIX, pack
from tests.golden.damage import DAMAGES, Damage
from tests.whole_run import CURRENT, STACK

EXPECTED = "expected.json"
STEM = "fsdp_dtensor"


def safe_folder() -> Path:
    """Of this version of the format, written by this stack."""
    writer = "" if STACK == CURRENT else f"-{STACK}"
    return cases.FOLDER / f"safe-{VERSION[0]}.{VERSION[1]}{writer}"


def stock_folder() -> Path:
    """Of the installed Megatron-Core's `fsdp_dtensor`."""
    return cases.FOLDER / f"stock-{'.'.join(version('megatron-core').split('.')[:2])}"


def make() -> None:
    """Make all that this stack can; one set of damaged ones is enough."""
    damages = DAMAGES if STACK == CURRENT else {"safe": {}, "stock": {}}
    has_bridge = is_installed("megatron.bridge")  # and with it Transformer Engine's FusedAdam
    safe = {name: saved for name, saved in cases.SAFE.items() if has_bridge or saved.recipe.optimizer != "auto"}
    with RankPool(2, preload=installed(BRIDGE_MODULES if has_bridge else MEGATRON_MODULES), time_limit=300.0) as pool:
        _make(safe_folder(), {name: _saving(pool, saved) for name, saved in safe.items()}, damages["safe"])
        if has_bridge:
            made = {name: _training(pool, **run) for name, run in cases.STOCK.items()}
            _make(stock_folder(), made, damages["stock"])


def _make(folder: Path, made: dict[str, Callable[[Path], Any]], damages: Mapping[str, Damage]) -> None:
    """Each checkpoint, and what it holds by key: dtype, shape, SHA-256 of the elements; then the damaged ones."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with tempfile.TemporaryDirectory() as plain:
        place = Path(plain)
        expected = {name: dict(sorted(into(place / name).items())) for name, into in made.items()}
        for name in made:
            pack(place / name, folder / f"{name}{SUFFIX}")
        for name, (of, damage, _) in damages.items():
            damaged = Path(shutil.copytree(place / of, place / "damaged" / name))
            damage(damaged)
            (folder / "damaged").mkdir(exist_ok=True)
            pack(damaged, folder / "damaged" / f"{name}{SUFFIX}")
    lines = [f'"{name}": {json.dumps(found).replace("], ", "],\n  ")}' for name, found in expected.items()]
    (folder / EXPECTED).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _saving(pool: RankPool, saved: cases.Saved) -> Callable[[Path], Any]:
    return lambda place: pool.run(cases.save, str(place), saved, ranks=saved.ranks)[0]


def _training(pool: RankPool, ranks: int, **layout: Any) -> Callable[[Path], Any]:
    """Of Bridge's files only those that make the checkpoint: the others say where it was made."""

    def made(place: Path) -> Any:
        with tempfile.TemporaryDirectory(prefix="golden-") as root:
            run = Run(root, cases.STEPS, format=STEM, experts=0, config=cases.SMALL_RUN, **layout)
            found = pool.run(train, run, ranks=ranks)[0]
            place.mkdir()
            for pattern in (".metadata", "*.distcp"):
                for file in Path(root, f"iter_{cases.STEPS:07d}").glob(pattern):
                    shutil.copyfile(file, place / file.name)
        return found["end"]

    return made


if __name__ == "__main__":
    make()
