# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters over fused layers.

What a layer that Bridge's AdapterWrapper replaced holds:

    to_wrap.weight                  the frozen layer, in the state dict without `to_wrap`
    adapter.linear_in.weight        (dim, hidden): not fused
    adapter.linear_out.weight       (rows of the frozen layer, dim): fused as that layer is

Grouped experts share one adapter, of which Bridge keeps all expert-parallel ranks' copies equal.
"""

from __future__ import annotations

from dataclasses import replace

from mbridge_fsdp_ckpt.errors import FamilyError
from mbridge_fsdp_ckpt.families.declaration import ParameterContext

_ADAPTED = (".adapter.linear_out", ".adapter")  # where a LoRA's output projection and a DoRA's magnitudes hang
_LEAVES = ("weight", "bias", "weight_magnitude")


def base_of(parameter: ParameterContext) -> ParameterContext | None:
    """The adapted layer's weight, with this parameter's shape, if this is what an adapter adds to its rows."""
    path = parameter.ancestors[0][0]
    if parameter.leaf not in _LEAVES or not path.endswith(_ADAPTED):
        return None
    level = 2 if path.endswith(_ADAPTED[0]) else 1
    wrapper_path, wrapper = parameter.ancestors[level]
    base = getattr(wrapper, "to_wrap", None)
    if base is None:
        return None
    ancestors = ((wrapper_path, base), *parameter.ancestors[level + 1 :])
    return replace(parameter, name=f"{wrapper_path}.weight", ancestors=ancestors)


def is_shared_by_experts(parameter: ParameterContext) -> bool:
    """Whether this is the one adapter of all grouped experts, of which each expert-parallel rank has a copy.

    Raises:
        FamilyError: It packs an adapter for each expert: expert parallelism cuts one dimension, tensor parallelism
            another, along which gate and up are fused besides.
    """
    owner, _, inside = parameter.name.rpartition(".adapter.")
    if not owner.endswith((".experts.linear_fc1", ".experts.linear_fc2")) or not inside:
        return False
    if len(parameter.local_shape) > 2:
        raise FamilyError(
            expected="one adapter for all grouped experts",
            found=f"shape {parameter.local_shape}: one for each expert, packed",
            remedy="Build the adapters with share_expert_adapters=True.",
            key=parameter.name,
        )
    return True
