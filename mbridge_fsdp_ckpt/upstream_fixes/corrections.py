# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a plug-in corrects in megatron-core while it is registered.

    megatron.core.optimizer.HybridDeviceOptimizer    cannot step under Megatron-FSDP; see hybrid_optimizer.py
    finalize_model_grads._get_main_grad_attr         does not find decoupled gradients; see `_grad_attribute`

Two plug-ins may be registered in one process: what they share stays until the last of them is gone.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from mbridge_fsdp_ckpt.patching import Patches

_patches = Patches()
_users: set[str] = set()


def apply(user: str) -> None:
    """Correct megatron-core for a plug-in, unless another has done it."""
    if not _users:
        try:
            _patch()
        except BaseException:
            _patches.undo()
            raise
    _users.add(user)


def withdraw(user: str) -> None:
    """A plug-in needs them no more.  Does nothing where it never did."""
    _users.discard(user)
    if not _users:
        _patches.undo()


def _patch() -> None:
    import megatron.core.optimizer as megatron_optimizer

    from mbridge_fsdp_ckpt.upstream_fixes.hybrid_optimizer import ShardedHybridDeviceOptimizer

    _patches.set(megatron_optimizer, "HybridDeviceOptimizer", ShardedHybridDeviceOptimizer)
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")  # a function hides the module
    _patches.set(finalize, "_get_main_grad_attr", _grad_attribute(finalize._get_main_grad_attr))


def _grad_attribute(stock: Callable[[Any], str]) -> Callable[[Any], str]:
    """Where a parameter's gradient is.

    Megatron sums the gradients of norms over the tensor-parallel ranks, which hold copies of them.  With
    `megatron_fsdp_use_decoupled_grad`, megatron-core 0.19 finds no gradient to sum: the copies drift apart without a
    word, and no checkpoint, which holds one of them, can resume the run bit for bit.
    """

    @functools.wraps(stock)
    def attribute(param: Any) -> str:
        return "decoupled_grad" if getattr(param, "decoupled_grad", None) is not None else stock(param)

    return attribute
