# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Putting FP8 scaling state back as a load does, without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from mbridge_fsdp_ckpt.live.fp8.state import Modules, OnDisk, State, find_restorations


def restore(modules: Modules, saved: Mapping[str, State], on_disk: OnDisk = str) -> None:
    """All is checked before the first module changes."""
    for restoration in find_restorations(modules, saved, on_disk):
        restoration.apply()
