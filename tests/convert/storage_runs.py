# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Training runs whose checkpoints are converted: by Bridge alone, and with this package."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from testing.ranks import RankPool
from tests.bridge.training import Run, train
from tests.core import oracle

STOCK, SAFE = "fsdp_dtensor", "fsdp_dtensor_safe"
TRACKER = "latest_checkpointed_iteration.txt"
STRICT = {"checkpoint.strict_fsdp_dtensor_load": True}


@dataclass(frozen=True)
class Trained:
    """A run of four iterations that saved after the second and the fourth.

    Args:
        run: How it was started.
        losses: By iteration.
        end: Every tensor after the fourth.
    """

    run: Run
    losses: dict[int, float]
    end: oracle.Digests

    @property
    def root(self) -> Path:
        """Where its checkpoints are."""
        return Path(self.run.directory)

    @property
    def middle(self) -> Path:
        """The checkpoint after the second iteration."""
        return self.root / "iter_0000002"


@pytest.fixture(scope="package")
def stock_run(bridge_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run of Bridge alone, tensor-parallel over two ranks."""
    return _trained(bridge_ranks, Run(str(tmp_path_factory.mktemp("stock")), format=STOCK, tensor=2, config=STRICT))


@pytest.fixture(scope="package")
def safe_run(bridge_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run that saves in this format, data-parallel over two ranks, each with experts of its own."""
    return _trained(bridge_ranks, Run(str(tmp_path_factory.mktemp("safe")), format=SAFE, expert=2))


def _trained(ranks: RankPool, run: Run) -> Trained:
    [first, _] = ranks.run(train, run, ranks=2)
    return Trained(run, first["losses"], first["end"])


def resumed(ranks: RankPool, before: Trained, root: Path, **changes: Any) -> dict[str, Any]:
    """Go on from the checkpoint below a root, which its tracker names, to the fourth iteration."""
    [first, _] = ranks.run(train, before.run.on(directory=str(root), **changes), ranks=2)
    found: dict[str, Any] = first
    return found


def goes_on_as(before: Trained, again: dict[str, Any]) -> None:
    """A resumed run repeats the uninterrupted one, bit for bit."""
    assert again["losses"] == {step: before.losses[step] for step in (3, 4)}
    assert again["end"] == before.end


def copied(checkpoint: Path, root: Path) -> Path:
    """A copy below another root, to be damaged."""
    return Path(shutil.copytree(checkpoint, root / checkpoint.name))
