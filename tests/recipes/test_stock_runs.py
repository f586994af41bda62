# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Runs that stock saved go on here: with multi-token prediction, whose keys stock 0.19 names otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.ranks import RankPool
from tests.core import oracle
from tests.recipes.runs import Run, train
from tests.run_directories import as_it_was

pytestmark = pytest.mark.bridge

RANKS = 4
RECIPE = "qwen3_next_80b_a3b_pretrain_tiny"


def test_a_stock_run_with_multi_token_prediction_goes_on(bridge_ranks: RankPool, tmp_path: Path) -> None:
    stock = Run(RECIPE, str(tmp_path / "stock"), format="fsdp_dtensor")
    whole = bridge_ranks.run(train, stock, ranks=RANKS)
    place = as_it_was(tmp_path / "stock", tmp_path / "safe", 1)
    later = bridge_ranks.run(train, Run(RECIPE, place), ranks=RANKS)
    for through, again in zip(whole, later, strict=True):
        assert again == {step: through[step] for step in (2, 3)}
    theirs = oracle.on_disk(tmp_path / "stock" / "iter_0000003")
    assert any(".mtp_model_layer." in key for key in theirs)
    ours = oracle.on_disk(tmp_path / "safe" / "iter_0000003")
    assert ours == {key.replace(".mtp_model_layer.", ".transformer_layer."): value for key, value in theirs.items()}
