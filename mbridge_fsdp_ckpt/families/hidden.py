# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Fused parameters that a module of one's own hides from the family that would claim them.

    self_attention.in_proj.weight          claimed by Gated DeltaNet
    self_attention.in_proj.inner.weight    claimed by nobody: `inner` is not what the family looks for

Stored whole, such a parameter would load wrongly at another tensor-parallel size, without an error.  Wrappers of torch
are not seen in the first place (`wrapping`), nor are adapters' (`to_wrap`).
"""

from __future__ import annotations

from dataclasses import replace

from mbridge_fsdp_ckpt.errors import FamilyError
from mbridge_fsdp_ckpt.families.declaration import ParameterContext
from mbridge_fsdp_ckpt.families.registry import FamilyRegistry


def refuse_hidden(parameter: ParameterContext, registry: FamilyRegistry) -> None:
    """Refuse a parameter that tensor parallelism cuts, that no family claims, and that one would claim further up.

    Args:
        parameter: One that is cut, and not claimed.
        registry: The families.

    Raises:
        FamilyError: It would be, if one or several of the modules right above it were not there.
    """
    if ".adapter." in f".{parameter.name}":  # a low-rank adapter's first projection is no layer's weight
        return
    for level in range(1, len(parameter.ancestors)):
        path, module = parameter.ancestors[level]
        seen = replace(parameter, name=f"{path}.{parameter.leaf}", ancestors=parameter.ancestors[level:])
        family = registry.that_would_claim(seen)
        if family is not None:
            raise FamilyError(
                expected=f"{seen.name}, which family {family!r} splits",
                found=f"the parameter inside of {type(module).__name__}, shape {parameter.local_shape} (one TP rank), "
                "which no family claims there",
                remedy="Let the wrapper take the layer's place under its own name, or add a family for it "
                "(docs/families.md): stored whole, it would load wrongly at another tensor-parallel size.",
                key=parameter.name,
            )
