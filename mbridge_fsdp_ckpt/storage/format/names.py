"""What files of a checkpoint are called, and what format names there are."""

from __future__ import annotations

from typing import Final

FORMAT_NAME: Final = "fsdp_dtensor_safe"
STOCK_FORMAT: Final = "fsdp_dtensor"

MANIFEST_NAME: Final = "manifest.json"
"""Our head."""

DCP_METADATA: Final = ".metadata"
"""Stock's head of a checkpoint; ours may have one beside its own, for stock to read."""
