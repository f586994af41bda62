# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A captured graph of an optimizer's step goes on reading where it read before the load."""

from __future__ import annotations

import pytest

from testing.modules import is_installed
from testing.ranks import RankPool
from tests.core import captured

needs_engine = pytest.mark.skipif(not is_installed("transformer_engine"), reason="needs Transformer Engine")


FUSED = [pytest.param(name, marks=needs_engine) for name in ("FusedAdam", "FusedAdam, bf16 moments")]


@pytest.mark.parametrize("name", ["torch Adam, captured", *FUSED])
def test_loaded_tensors_stay_where_a_graph_reads_them(name: str, megatron_ranks: RankPool) -> None:
    [found] = megatron_ranks.run(captured.load_captured, name, ranks=1)
    names = {"lr", "step", "exp_avg", "exp_avg_sq"}
    assert found == {"stayed": dict.fromkeys(names, True), "equal": dict.fromkeys(names, True)}


def test_state_on_the_host_that_no_graph_reads_is_not_copied_once_more(megatron_ranks: RankPool) -> None:
    [found] = megatron_ranks.run(captured.load_captured, "torch Adam", ranks=1)
    assert found["equal"] == dict.fromkeys(("lr", "step", "exp_avg", "exp_avg_sq"), True)
    assert found["stayed"] == {"lr": True, "step": False, "exp_avg": False, "exp_avg_sq": False}


@needs_engine
def test_a_step_counter_and_a_learning_rate_are_kept_as_the_loading_optimizer_keeps_them(
    megatron_ranks: RankPool,
) -> None:
    [found] = megatron_ranks.run(captured.load_otherwise, ranks=1)
    number, counter = ["torch.float32", 0.25], ["torch.int32", [3]]
    in_state = ["torch.float32", 3.0]
    assert found == [
        [0.25, in_state],
        [number, in_state],
        [number, counter],
        [0.25, 3],
        [number, counter],
        [number, counter],
        [0.25, in_state],
    ]


def test_kernels_stay_those_of_the_job(megatron_ranks: RankPool) -> None:
    [found] = megatron_ranks.run(captured.kernels_of_the_live_optimizer, ranks=1)
    assert found == {"lr": 0.25, "foreach": False, "fused": None, "capturable": False, "differentiable": False}


def test_checking_a_schedule_leaves_the_live_learning_rate(megatron_ranks: RankPool) -> None:
    assert megatron_ranks.run(captured.try_a_schedule, ranks=1) == [[1.0, 1.0, 0.5]]
