# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a model family fuses into one parameter, declared: see `declaration`."""

from mbridge_fsdp_ckpt.families.declaration import Claim, Family, ParameterContext, Segment
from mbridge_fsdp_ckpt.families.registry import FamilyRegistry, default_registry, register_family

__all__ = [
    "Claim",
    "Family",
    "FamilyRegistry",
    "ParameterContext",
    "Segment",
    "default_registry",
    "register_family",
]
