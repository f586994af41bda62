# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Bridge 0.6's export of a model wrapped in Megatron-FSDP, at tensor-parallel sizes above 1.

Bridge gathers a Megatron-FSDP parameter over all ranks at once; the mapping that then cuts it into Hugging Face
tensors must not gather over tensor-parallel ranks again.  Two places get this wrong:

    _module_uses_fsdp                   asks only for parameters whose names begin with "weight": `A_log`, `dt_bias`,
                                        `D` and `softmax_offset` are gathered twice
    ChunkedMapping, MambaInProjMapping  take components by the sizes of one tensor-parallel rank, and gather them:
                                        `conv1d` of Gated DeltaNet and Mamba, `in_proj` of Mamba
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from mbridge_fsdp_ckpt.patching import Patches


def correct_export(patches: Patches) -> None:
    """Put it right.  The caller has checked Bridge's version."""
    from megatron.bridge.models.conversion import param_mapping as mapping

    patches.set(mapping, "_module_uses_fsdp", is_sharded)
    for kind in (mapping.ChunkedMapping, mapping.MambaInProjMapping):
        patches.set(kind, "megatron_to_hf", _from_own_rows(kind.megatron_to_hf))


def is_sharded(module: Any) -> bool:
    """Whether Megatron-FSDP holds a module's parameters; None has none."""
    return any(isinstance(parameter, DTensor) for parameter in getattr(module, "_parameters", {}).values())


def _from_own_rows(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Hand over the rows of one tensor-parallel rank, which lie side by side in the gathered tensor."""

    @functools.wraps(stock)
    def megatron_to_hf(self: Any, megatron_weights: Any, megatron_module: Any) -> Any:
        if megatron_weights is not None and self.tp_size > 1 and is_sharded(megatron_module):
            megatron_weights = megatron_weights.chunk(self.tp_size)[self.tp_rank]
        return stock(self, megatron_weights, megatron_module)

    return megatron_to_hf
