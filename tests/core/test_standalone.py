# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Models that the package `megatron-fsdp` wrapped by its own functions, without Megatron-Core's parallel state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from testing.modules import is_installed
from testing.ranks import RankPool
from tests.core import standalone
from tests.core.standalone import Layout

pytestmark = pytest.mark.skipif(not is_installed("megatron_fsdp"), reason="needs the package megatron-fsdp")


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_a_resumed_run_repeats_the_uninterrupted_one(strategy: str, megatron_ranks: RankPool, tmp_path: Path) -> None:
    """`optim_grads_params`, the default, is that of the examples: tests/examples."""
    seen = megatron_ranks.run(standalone.train_and_resume, str(tmp_path / "c"), Layout(strategy), ranks=2)
    for through, resumed in seen:
        assert through == resumed


@pytest.mark.parametrize(
    ("saved_in", "ranks", "loaded_in", "other"),
    [
        pytest.param(Layout(), 3, Layout(tensor=2), 2, id="3 ranks"),
        pytest.param(Layout(tensor=2), 4, Layout("no_shard"), 1, id="TP 2 by torch"),
        pytest.param(Layout(outer=2), 4, Layout(tensor=2), 2, id="hybrid"),
    ],
)
def test_it_loads_in_another_layout(
    saved_in: Layout, ranks: int, loaded_in: Layout, other: int, megatron_ranks: RankPool, tmp_path: Path
) -> None:
    directory = str(tmp_path / "c")
    saved = megatron_ranks.run(standalone.train_and_save, directory, saved_in, ranks=ranks)
    loaded = megatron_ranks.run(standalone.load, directory, loaded_in, ranks=other)
    assert loaded[0].keys() == saved[0].keys()
    assert [key for key, value in saved[0].items() if not torch.equal(value, loaded[0][key])] == []
