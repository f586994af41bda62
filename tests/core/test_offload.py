# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""HybridDeviceOptimizer under Megatron-FSDP gives the weights that the same optimizer gives without offload."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from testing.models import Recipe
from testing.ranks import RankPool
from tests.core import cases
from tests.soak import sampling

MODEL = Recipe(layers=2, experts=4)
OFFLOAD = list(itertools.product((False, True), (1.0, 0.5, 0.25)))


@pytest.mark.parametrize(("overlap", "fraction"), sampling.drawn("offload", OFFLOAD, share=3))
def test_offload_changes_rounding_only(fraction: float, overlap: bool, megatron_ranks: RankPool) -> None:
    settings = {"overlap_cpu_optimizer_d2h_h2d": overlap}
    offloaded = MODEL.on(offload=fraction, optimizer_settings=settings)
    plain = megatron_ranks.run(cases.weights_after, MODEL, 3, ranks=2)
    hybrid = megatron_ranks.run(cases.weights_after, offloaded, 3, ranks=2)
    start = megatron_ranks.run(cases.weights_after, MODEL, 0, ranks=2)
    for one, other, initial in zip(plain, hybrid, start, strict=True):
        np.testing.assert_allclose(other["losses"], one["losses"], rtol=1e-4)
        for key, weight in one["weights"].items():
            np.testing.assert_allclose(other["weights"][key], weight, rtol=1e-4, atol=2e-5, err_msg=key)
        moved = [
            key for key, weight in one["weights"].items() if weight.size and np.any(weight != initial["weights"][key])
        ]
        assert len(moved) == sum(weight.size > 0 for weight in one["weights"].values())
