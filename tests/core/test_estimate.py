# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What `estimate` says of a job is what a save of that job does: the same rows, bytes and keys on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testing.models import Recipe
from testing.ranks import RankPool
from tests.core import cases, estimated
from tests.core.test_layouts import DENSE, LAYOUTS, OPTIMIZERS, QWEN, STRATEGIES, optimizers
from tests.soak import sampling

MODELS = {"Qwen": QWEN, "dense": DENSE}


def check(recipe: Recipe, ranks: int, megatron_ranks: RankPool, directory: Path) -> None:
    megatron_ranks.run(cases.train_and_save, str(directory), recipe, ranks=ranks)
    (found,) = megatron_ranks.run(estimated.estimate, recipe, ranks, ranks=1)
    real = estimated.written(directory)
    assert found["rows"] == real["rows"]
    assert found["keys"] == real["keys"]
    assert {rank: work.bytes for rank, work in found["planned"].items()} == real["payload"]
    assert {rank: estimated.counts(work) for rank, work in found["planned"].items()} == real["counted"]
    assert found["counted"] == found["planned"]
    assert found["files"] == len(cases.names_in(directory))
    assert sum(real["payload"].values()) > 0
    assert 0.7 < found["index"] / sum(path.stat().st_size for path in directory.glob("*.index")) < 1.4


@pytest.mark.parametrize("name", sampling.drawn("estimated layouts", list(LAYOUTS), share=3))
def test_layouts(name: str, megatron_ranks: RankPool, tmp_path: Path) -> None:
    ranks, layout = LAYOUTS[name]
    for model, recipe in MODELS.items():
        if model == "Qwen" or "expert" not in layout:
            check(recipe.on(**layout), ranks, megatron_ranks, tmp_path / model)


@pytest.mark.parametrize("name", sampling.drawn("estimated strategies", list(STRATEGIES), share=2))
def test_strategies(name: str, megatron_ranks: RankPool, tmp_path: Path) -> None:
    ranks, layout = STRATEGIES[name]
    check(QWEN.on(**layout), ranks, megatron_ranks, tmp_path / "c")


@pytest.mark.parametrize("name", optimizers(sampling.drawn("estimated optimizers", list(OPTIMIZERS), share=3)))
def test_optimizers(name: str, megatron_ranks: RankPool, tmp_path: Path) -> None:
    settings: dict[str, Any] = OPTIMIZERS[name]
    check(QWEN.on(**settings), 2, megatron_ranks, tmp_path / "c")


@pytest.mark.parametrize("name", sampling.drawn("estimated loads", list(LAYOUTS), share=5))
def test_loads_elsewhere(name: str, megatron_ranks: RankPool, tmp_path: Path) -> None:
    ranks, layout = LAYOUTS[name]
    saved, loading = QWEN.on(tensor=2), QWEN.on(**layout)
    megatron_ranks.run(cases.train_and_save, str(tmp_path / "c"), saved, ranks=4)
    ((ratio, held),) = megatron_ranks.run(estimated.elsewhere, saved, 4, loading, ranks, ranks=1)
    assert ratio == pytest.approx(estimated.really_read(tmp_path / "c", held), rel=1e-12)
    assert len(held) > 50
