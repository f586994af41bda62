# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Count the collectives that a piece of code issues."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed._functional_collectives as functional
from torch.distributed import distributed_c10d

from mbridge_fsdp_ckpt.patching import Patches, rebind_everywhere

COLLECTIVES = (
    "_all_gather_base",
    "_reduce_scatter_base",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)

POINT_TO_POINT = ("batch_isend_irecv", "irecv", "isend", "recv", "recv_object_list", "send", "send_object_list")

FUNCTIONAL_COLLECTIVES = (
    "all_gather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_tensor",
    "all_gather_tensor_autograd",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "broadcast",
    "permute_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd",
    "reduce_scatter_tensor_coalesced",
)
"""What DTensor redistributes with; functions of `torch.distributed._functional_collectives`."""


@dataclass
class CollectiveCounts:
    """How often this rank called each function.  A call made inside another counted call is not counted itself."""

    collectives: Counter[str] = field(default_factory=Counter)
    point_to_point: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """All collectives together, without point-to-point messages."""
        return self.collectives.total()


_counting: list[CollectiveCounts] = []


@functools.cache
def watch_collectives() -> None:
    """Put what counts in place, for good.  A second call does nothing.

    It looks through all names of all loaded modules.  Done before ranks are forked, it is done once: modules that are
    imported later bind what counts.
    """
    depth = threading.local()
    replacements = []
    for owner, names, kind in (
        (distributed_c10d, COLLECTIVES, "collectives"),
        (functional, FUNCTIONAL_COLLECTIVES, "collectives"),
        (distributed_c10d, POINT_TO_POINT, "point_to_point"),
    ):
        found = [(getattr(owner, name, None), name) for name in names]  # the names span versions of torch
        replacements += [(call, _counted(call, name, kind, depth)) for call, name in found if call is not None]
    rebind_everywhere(Patches(), replacements)


@contextmanager
def count_collectives() -> Iterator[CollectiveCounts]:
    """Count, by name, every collective that this process issues until the block ends, in any thread.

    Functional collectives count under the names of their functions.  Calls of methods of a ProcessGroup and of
    torch.ops, which name no function of torch.distributed, are not seen.  Creating groups is not a collective.
    """
    watch_collectives()
    counts = CollectiveCounts()
    _counting.append(counts)
    try:
        yield counts
    finally:
        _counting[:] = [other for other in _counting if other is not counts]


def _counted(original: Callable[..., Any], name: str, kind: str, depth: threading.local) -> Callable[..., Any]:
    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if getattr(depth, "value", 0) == 0:
            for counts in _counting:
                getattr(counts, kind)[name] += 1
        depth.value = getattr(depth, "value", 0) + 1
        try:
            return original(*args, **kwargs)
        finally:
            depth.value -= 1

    return counted
