# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Which ranks hold copies of what this rank holds: a question to the device mesh, without a word between ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from mbridge_fsdp_ckpt.families.naming import is_expert_name
from mbridge_fsdp_ckpt.live.mesh import peers
from mbridge_fsdp_ckpt.plan.slices import Component, ParameterPlan

Ranks = tuple[int, ...]

MOST_NEAR = 16
"""Ranks whose index files one rank looks into: each costs a file to open."""


class Peers:
    """Who holds the same blocks as this rank; asks the mesh once for each kind of parameter.

    Args:
        module: The model's `MegatronFSDP` module.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._known: dict[tuple[tuple[str, ...], bool, bool], Ranks] = {}

    def of(self, plan: ParameterPlan, component: Component) -> Ranks:
        """Global ranks that hold the same of a component, in order, this one among them; see `peers`."""
        along, expert = plan.layout.copied_along, is_expert_name(plan.layout.key)
        # a component that tensor parallelism does not cut, of a parameter that it cuts, has more copies
        whole = any(p.component == component and p.replica.count > plan.layout.replica.count for p in plan.slices)
        kind = along, expert, whole
        if kind not in self._known:
            self._known[kind] = tuple(peers(self._module, along, expert=expert, whole=whole))
        return self._known[kind]


def ranks_with_copies(peers: Peers, plans: Iterable[ParameterPlan], rank: int) -> list[int]:
    """Ranks that may have written what this rank holds and did not write itself: those with most copies of it.

    A pipeline stage's copy of another stage's parameter does not count: its peers have not written it either.

    Args:
        peers: Of the model.
        plans: Of the model's parameters, and so of its optimizer's.
        rank: This rank.

    Returns:
        Other global ranks, sorted, at most `MOST_NEAR`.
    """
    groups: Counter[Ranks] = Counter()
    for plan in plans:
        unwritten = () if plan.layout.is_copy else (p.component for p in plan.slices if not p.writes)
        groups.update(peers.of(plan, component) for component in dict.fromkeys(unwritten))
    held: Counter[int] = Counter()
    for group, times in groups.items():
        held.update({other: times for other in group if other != rank})
    most = sorted(held, key=lambda other: (-held[other], other))
    return sorted(most[:MOST_NEAR])
