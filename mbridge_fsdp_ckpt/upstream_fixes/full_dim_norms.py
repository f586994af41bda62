# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""MiniMax-M2's norms over all heads of Q or K: each tensor-parallel rank has the weights of its own heads.

Bridge 0.6 does not mark these weights as sharded, as Megatron marks all others.  Megatron-FSDP, its stock checkpoints
and gradient norms then take them for copies, and a checkpoint keeps the first rank's for all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mbridge_fsdp_ckpt.patching import Patches


def mark_as_sharded(patches: Patches) -> None:
    """Have them marked when they are built.  The caller has checked Bridge's version."""
    from megatron.bridge.models.minimax_m2.minimax_m2_provider import _FullDimRMSNorm

    patches.set(_FullDimRMSNorm, "__init__", _marking(_FullDimRMSNorm.__init__))


def _marking(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        from megatron.core.parallel_state import get_tensor_model_parallel_world_size as tensor_size
        from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

        stock(self, *args, **kwargs)
        if self.shard_world_size == tensor_size():  # fewer K heads than ranks: groups of ranks hold copies
            set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    return init
