# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Weights in FP8 without a main weight have no high-precision values to store: refused by name, on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.modules import is_installed
from testing.ranks import RankPool
from tests.core import cases, frozen

pytestmark = pytest.mark.skipif(not is_installed("transformer_engine"), reason="needs Transformer Engine")


def test_frozen_fp8_weights_are_refused_and_an_adapter_over_them_is_not(
    megatron_ranks: RankPool, tmp_path: Path
) -> None:
    results = megatron_ranks.run(frozen.save_and_load, str(tmp_path), ranks=2)
    assert results[0] == results[1]
    assert results[0]["untouched"]
    assert results[0]["loaded"]
    assert cases.names_in(tmp_path) == ["adapter", "plain"]
    assert len(results[0]["errors"]) == 2
    for name, text in results[0]["errors"]:
        assert name == "UnsupportedStateError"
        assert "base.weight" in text
        assert "fp8_param_gather" in text


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_sharded_they_cannot_be_wrapped_at_all(strategy: str, megatron_ranks: RankPool) -> None:
    """Should a Megatron-FSDP wrap them, look whether what it holds of them is refused, too."""
    [said] = megatron_ranks.run(frozen.wrap, strategy, ranks=1)
    assert said == "only Tensors of floating point dtype can require gradients"
