# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A load allocates optimizer state once, and puts that memory in place."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.models import Recipe
from testing.ranks import RankPool
from tests.core import cases, memory
from tests.core.test_layouts import OPTIMIZERS, needs_engine, optimizers

SMALL = Recipe(layers=1, hidden=64)


FOUR = ["torch Adam", "FusedAdam", "FusedAdam, bf16 moments", "offload 0.5 over FusedAdam"]


@pytest.mark.parametrize("name", optimizers(FOUR))
def test_resuming_takes_the_state_and_no_second_copy_of_it(name: str, megatron_ranks: RankPool, tmp_path: Path) -> None:
    recipe = SMALL.on(**OPTIMIZERS[name])
    megatron_ranks.run(cases.train_and_save, str(tmp_path / "c"), recipe, ranks=2)
    for found in megatron_ranks.run(memory.load, str(tmp_path / "c"), recipe, ranks=2):
        assert found["state"] > 50_000
        assert found["state"] <= found["peak"] < 1.02 * found["state"]


@needs_engine
def test_new_state_waits_beside_the_old(megatron_ranks: RankPool) -> None:
    megatron_ranks.run(memory.state_waits_for_its_installation, ranks=1)


@needs_engine
def test_slots_that_fused_adam_does_not_keep_are_refused(megatron_ranks: RankPool) -> None:
    unknown, bits, number = megatron_ranks.run(memory.foreign_slots, ranks=1)[0]
    assert "exp_avg (torch.float32), exp_avg_sq (torch.float32)" in unknown
    assert "'max_exp_avg_sq'" in unknown
    assert "'exp_avg' of torch.int16" in bits
    assert "'exp_avg' of torch.float32, tensor" in number
