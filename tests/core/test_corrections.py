# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What plug-ins correct in megatron-core, while any of them is registered."""

from __future__ import annotations

import importlib
from typing import Any

from testing.ranks import RankPool


def register_two() -> list[tuple[str, bool]]:
    import megatron.core.optimizer as megatron_optimizer

    from mbridge_fsdp_ckpt.upstream_fixes import corrections

    finalize: Any = importlib.import_module("megatron.core.distributed.finalize_model_grads")

    def now() -> tuple[Any, Any]:
        return megatron_optimizer.HybridDeviceOptimizer, finalize._get_main_grad_attr

    before, seen = now(), []
    for action, plug_in in (
        (corrections.apply, "first"),
        (corrections.apply, "second"),
        (corrections.apply, "second"),
        (corrections.withdraw, "never there"),
        (corrections.withdraw, "first"),
        (corrections.withdraw, "second"),
        (corrections.withdraw, "second"),
    ):
        action(plug_in)
        hybrid, gradient = now()
        seen.append((hybrid.__name__, gradient is before[1]))
    assert now() == before
    return seen


def test_they_stay_until_the_last_plug_in_is_gone(megatron_ranks: RankPool) -> None:
    [seen] = megatron_ranks.run(register_two, ranks=1)
    assert seen == [("ShardedHybridDeviceOptimizer", False)] * 5 + [("HybridDeviceOptimizer", True)] * 2
