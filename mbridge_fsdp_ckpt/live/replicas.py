# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Which ranks hold copies of what this rank holds: a question to the device mesh, without a word between ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from mbridge_fsdp_ckpt.live.readers.protocol import Ranks
from mbridge_fsdp_ckpt.plan.slices import ParameterPlan

MOST_NEAR = 16
"""Ranks whose index files one rank looks into: each costs a file to open."""


def ranks_with_copies(peers: Callable[[ParameterPlan], Ranks], plans: Iterable[ParameterPlan], rank: int) -> list[int]:
    """Ranks that may have written what this rank holds and did not write itself: those with most copies of it.

    A pipeline stage's copy of another stage's parameter does not count: its peers have not written it either.

    Args:
        peers: `Reader.peers` of the model.
        plans: Of the model's parameters, and so of its optimizer's.
        rank: This rank.

    Returns:
        Other global ranks, sorted, at most `MOST_NEAR`.
    """
    groups: Counter[Ranks] = Counter()
    for plan in plans:
        unwritten = set() if plan.layout.is_copy else {p.component for p in plan.slices if not p.writes}
        if unwritten:
            groups[peers(plan)] += len(unwritten)
    held: Counter[int] = Counter()
    for group, times in groups.items():
        held.update({other: times for other in group if other != rank})
    most = sorted(held, key=lambda other: (-held[other], other))
    return sorted(most[:MOST_NEAR])
