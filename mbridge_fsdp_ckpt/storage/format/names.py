"""What files of a checkpoint are called, and what format names there are."""

from __future__ import annotations

from typing import Final

FORMAT_NAME: Final = "fsdp_dtensor_safe"
STOCK_FORMAT: Final = "fsdp_dtensor"

MANIFEST_NAME: Final = "manifest.json"
"""Our head."""

DCP_METADATA: Final = ".metadata"
"""Stock's head of a checkpoint; ours may have one beside its own, for stock to read."""


def payload_name(rank: int, suffix: str = "", file: int = 0) -> str:
    """A rank's payload file; rank 0's second one has what stock's view says besides tensors."""
    return f"__{rank}_{file}{suffix}.distcp"


def table_name(rank: int, suffix: str = "") -> str:
    """A rank's chunk table."""
    return f"chunks_{rank:05d}{suffix}.jsonl"
