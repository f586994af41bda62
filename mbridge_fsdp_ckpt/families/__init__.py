"""What a model family fuses into one parameter, declared: see `registry`."""

from mbridge_fsdp_ckpt.families.registry import (
    Claim,
    Family,
    FamilyRegistry,
    ParameterContext,
    Segment,
    default_registry,
    register_family,
)

__all__ = [
    "Claim",
    "Family",
    "FamilyRegistry",
    "ParameterContext",
    "Segment",
    "default_registry",
    "register_family",
]
