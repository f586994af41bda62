# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Real Megatron-FSDP and Megatron's offloading optimizer run on CPU ranks."""

import math
from typing import Any

import torch

from testing.models import VOCABULARY, Recipe, build
from testing.ranks import RankPool

HIDDEN, FFN = 32, 48
WEIGHTS_OF_A_LAYER = HIDDEN * 3 * HIDDEN + HIDDEN * HIDDEN + HIDDEN * 2 * FFN + FFN * HIDDEN + 2 * HIDDEN
WEIGHTS = 2 * WEIGHTS_OF_A_LAYER + 2 * VOCABULARY * HIDDEN + HIDDEN


def train(steps: int) -> dict[str, Any]:
    trainable = build(Recipe(layers=2, hidden=HIDDEN, ffn=FFN, strategy="optim_grads_params", optimizer="torch"))
    inner = trainable.optimizer.optimizer
    shards = [parameter._local_tensor for group in inner.param_groups for parameter in group["params"]]
    before = [shard.clone() for shard in shards]
    losses = [trainable.step(0) for _ in range(steps)]
    changed = [not torch.equal(old, new) for old, new in zip(before, shards, strict=True) if new.numel()]
    return {
        "optimizer": type(inner).__name__,
        "losses": losses,
        "on cuda": {shard.is_cuda for shard in shards},
        "changed": all(changed),
        "held": sum(shard.numel() for shard in shards),
        "empty": sum(not shard.numel() for shard in shards),
    }


def test_megatron_fsdp_trains(megatron_ranks: RankPool) -> None:
    results = megatron_ranks.run(train, 2, ranks=2)
    assert sum(result["held"] for result in results) == WEIGHTS
    assert sum(result["empty"] for result in results) > 0, "some parameter must be held by one rank alone"
    for result in results:
        assert result["optimizer"] == "AdamW"
        assert result["on cuda"] == {True}
        assert result["changed"]
        first, second = result["losses"]
        assert math.isfinite(first)
        assert second < first
    assert results[0]["losses"] == results[1]["losses"]
    assert megatron_ranks.run(train, 2, ranks=2) == results, "the same case again, in the same processes"


def offload(fraction: float) -> dict[str, Any]:
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    parameters = [torch.nn.Parameter(torch.full((4,), float(value), device="cuda")) for value in (1, 2)]
    optimizer = HybridDeviceOptimizer(
        parameters,
        offload_fraction=fraction,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        lr=0.5,
        weight_decay=0.0,
    )
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    inner = [optimizer.param_to_inner_param[parameter] for parameter in parameters]
    return {
        "cpu": sum(parameter.numel() for group in optimizer.cpu_param_groups for parameter in group["params"]),
        "gpu": sum(parameter.numel() for group in optimizer.gpu_param_groups for parameter in group["params"]),
        "updated on cuda": [parameter.is_cuda for parameter in inner],
        "state on cuda": [optimizer.state[parameter]["exp_avg"].is_cuda for parameter in parameters],
        "values": [round(parameter[0].item(), 3) for parameter in parameters],
        "is a copy": [one is not other for one, other in zip(inner, parameters, strict=True)],
    }


def test_the_offloading_optimizer_takes_its_real_branches(megatron_ranks: RankPool) -> None:
    results = [megatron_ranks.run(offload, fraction, ranks=1)[0] for fraction in (0.0, 0.5, 1.0)]
    assert [(result["cpu"], result["gpu"]) for result in results] == [(0, 8), (4, 4), (8, 0)]
    for result, on_cuda in zip(results, ([True, True], [False, True], [False, False]), strict=True):
        assert result["updated on cuda"] == on_cuda
        assert result["state on cuda"] == on_cuda
        assert result["is a copy"] == [not place for place in on_cuda]
        assert result["values"] == [0.5, 1.5]


def draw_inside_and_outside_the_tracker() -> tuple[list[float], list[float], list[float]]:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    torch.manual_seed(1)
    outside = torch.rand(2).tolist()
    torch.manual_seed(1)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        inside = torch.rand(2).tolist()
    return outside, inside, torch.rand(2).tolist()


def test_megatron_random_states_govern_what_is_drawn(megatron_ranks: RankPool) -> None:
    first, second = megatron_ranks.run(draw_inside_and_outside_the_tracker, ranks=2)
    for outside, inside, afterwards in (first, second):
        assert inside != outside
        assert afterwards == outside, "the state from before the fork is back"
    assert first[0] == second[0]
    assert first[1] != second[1], "tensor-parallel ranks draw different numbers inside"
