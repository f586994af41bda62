"""Real Megatron-FSDP and Megatron's offloading optimizer run on CPU ranks."""

import math
from typing import Any

import torch

from mbridge_fsdp_ckpt.testing.models import VOCABULARY, Recipe, build
from mbridge_fsdp_ckpt.testing.ranks import RankPool

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


def test_megatron_fsdp_trains(rank_pool: RankPool) -> None:
    results = rank_pool.run(train, 2, ranks=2)
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
    assert rank_pool.run(train, 2, ranks=2) == results, "the same case again, in the same processes"


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


def test_the_offloading_optimizer_takes_its_real_branches(rank_pool: RankPool) -> None:
    results = [rank_pool.run(offload, fraction, ranks=1)[0] for fraction in (0.0, 0.5, 1.0)]
    assert [(result["cpu"], result["gpu"]) for result in results] == [(0, 8), (4, 4), (8, 0)]
    for result, on_cuda in zip(results, ([True, True], [False, True], [False, False]), strict=True):
        assert result["updated on cuda"] == on_cuda
        assert result["state on cuda"] == on_cuda
        assert result["is a copy"] == [not place for place in on_cuda]
        assert result["values"] == [0.5, 1.5]
