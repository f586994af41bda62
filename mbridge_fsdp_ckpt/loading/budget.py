# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""How much of a checkpoint a rank may keep in memory between verification and use."""

from __future__ import annotations

import os
from pathlib import Path

from mbridge_fsdp_ckpt.settings import Settings


def read_budget(settings: Settings) -> int:
    """Bytes that this rank may keep of a checkpoint; see `Settings.read_buffer`."""
    if settings.read_buffer is not None:
        return settings.read_buffer
    return _available_memory() // 4 // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _available_memory() -> int:
    """Bytes of the host's memory that can be had without swapping (Linux `MemAvailable`)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
