# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Rows of `benchmarks.disk` that are not what is wanted of them, each with what it would be without what costs it."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.large import Compared

WANTED = 0.85
"""Of the faster raw rate, where a model is large."""

_LARGE = 1.5e9  # bytes
_OURS = {
    "save": ("save but for DCP metadata",),
    "load but for the gather": (
        "load but for the gather, memory taken before",
        "load but for gather and copy",
        "load but for the gather, memory taken before, not verified",
    ),
    "load but for the gather, another layout": ("load but for gather and copy, another layout",),
}
"""Rows of ours, each with the same without some of its costs, in the order of what is left out."""


def lines(one: Compared) -> list[str]:
    """What is missed of one model, as a list of the page; nothing where nothing is.

    Args:
        one: What `benchmarks.disk` makes of all ranks.
    """
    found = [f"- {name}: {why}{_without(one, name)}." for name in _OURS if (why := ", ".join(_misses(one, name)))]
    return ["", "Missed:", "", *found] if found else []


def _misses(one: Compared, name: str) -> Iterator[str]:
    seconds = one["seconds"]
    if one["bytes"] > _LARGE and "another layout" not in name and one["of raw"][name] < WANTED:
        yield f"{one['of raw'][name]:.0%} of raw, {WANTED:.0%} wanted"
    peers = [f"{name.replace(' but for the gather', '')}, {peer}" for peer in ("DCP", "torch_checkpointing")]
    ahead = [f"{peer} {seconds[peer]:.2f} s" for peer in peers if seconds.get(peer, seconds[name]) < seconds[name]]
    if ahead:
        yield f"{seconds[name]:.2f} s, {' and '.join(ahead)}"


def _without(one: Compared, name: str) -> str:
    """The same row without some of its costs."""
    rates = [f"{one['seconds'][part]:.2f} s, {one['of raw'][part]:.0%} ({part})" for part in _OURS[name]]
    return f"; without some of its costs {'; '.join(rates)}"
