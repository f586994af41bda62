# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""How evenly the ranks share the bytes: each rank where they are few, the extremes where they are many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.filesize import decimal

NAMED_RANKS = 32
"""Up to so many ranks are shown one by one."""
_EXTREMES = 5


@dataclass(slots=True)
class RankShare:
    """What one rank wrote."""

    bytes: int = 0
    chunks: int = 0
    files: int = 0


@dataclass(frozen=True, slots=True)
class Balance:
    """Rows to show, and sentences about all ranks.

    Args:
        rows: (name, rank, share).
        summary: Sentences.
        ratio: The heaviest rank's bytes over the mean; 1 is even.
    """

    rows: tuple[tuple[str, int, RankShare], ...]
    summary: tuple[str, ...]
    ratio: float


def balance(ranks: Mapping[int, RankShare]) -> Balance:
    """The balance of these ranks."""
    if not ranks:
        return Balance((), ("No rank wrote anything.",), 1.0)
    sizes = [share.bytes for share in ranks.values()]
    mean = sum(sizes) / len(sizes)
    ratio = max(sizes) / mean if mean else 1.0
    summary = [f"Mean {decimal(round(mean))} a rank, max/mean {ratio:.2f}."]
    shown = list(ranks)
    if len(shown) > NAMED_RANKS:
        by_size = sorted(shown, key=lambda rank: (-ranks[rank].bytes, rank))
        shown = by_size[:_EXTREMES] + by_size[-_EXTREMES:]
        summary.append(f"Shown are the {_EXTREMES} heaviest and the {_EXTREMES} lightest of {len(ranks)} ranks.")
    names = {rank: str(rank) if rank >= 0 else "unknown" for rank in shown}
    return Balance(tuple((names[rank], rank, ranks[rank]) for rank in shown), tuple(summary), ratio)
