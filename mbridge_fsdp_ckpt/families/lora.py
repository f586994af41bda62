"""Low-rank adapters over fused layers.

linear_fc1                          Bridge's AdapterWrapper
to_wrap.weight                  the frozen layer, in the state dict without `to_wrap`
adapter.linear_in.weight        (dim, hidden): not fused
adapter.linear_out.weight       (rows of the frozen layer, dim): fused as that layer is
"""

from __future__ import annotations

from dataclasses import replace

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
