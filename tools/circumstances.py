# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""When, where and with what the figures of a report came to be."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from testing.machine import machine, output, versions

_CHECKOUT = Path(__file__).parents[1]


def circumstances(scratch: Path, **more: str) -> dict[str, str]:
    """When a benchmark ran, what else is to be said of it, and on what."""
    time = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    return {"date": time, **more, **machine(scratch), **versions(), "commit": commit("mbridge_fsdp_ckpt")}


def today() -> str:
    """The date, the same wherever it is asked for."""
    return f"{datetime.now(UTC):%Y-%m-%d}"


def commit(*folders: str) -> str:
    """The commit that is checked out, and whether anything was changed since, in these folders or anywhere."""
    found = output(["git", "-C", str(_CHECKOUT), "rev-parse", "HEAD"])
    if not found:
        return "not a checkout"
    changed = output(["git", "-C", str(_CHECKOUT), "status", "--porcelain", "--", *(folders or ".")])
    return f"{found} with changes" if changed else found
