# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Rows about keys that ranks name one by one, where sums do not say enough: bounded, however many ranks there are.

Rows have an order, and where there are too many all from some place on are left out, on all ranks alike: of each key
that is named, every rank's rows are there, or none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypedDict

OF_ONE_RANK, IN_ALL = 500, 20_000

type Place = tuple[bool, str]
"""Where a row stands: what comes first, and its key."""


class Rows[R](TypedDict):
    """By rank; and the place from which on rows were left out, if they were."""

    by_rank: list[tuple[int, list[R]]]
    beyond: Place | None


def rows_of[R](rank: int, rows: Sequence[R], order: Callable[[R], Place]) -> Rows[R]:
    """What one rank names."""
    return _bounded([(rank, row) for row in rows], None, order, OF_ONE_RANK)


def together[R](messages: Sequence[Rows[R]], order: Callable[[R], Place]) -> Rows[R]:
    """What several ranks name."""
    rows = [(rank, row) for message in messages for rank, found in message["by_rank"] for row in found]
    ends = [(first, key) for message in messages if message["beyond"] is not None for first, key in [message["beyond"]]]
    return _bounded(rows, min(ends, default=None), order, IN_ALL)


def _bounded[R](rows: Sequence[tuple[int, R]], beyond: Place | None, order: Callable[[R], Place], most: int) -> Rows[R]:
    placed = sorted(((order(row), rank, row) for rank, row in rows), key=lambda item: item[:2])
    if len(placed) > most:
        beyond = min(beyond or placed[most][0], placed[most][0])
    by_rank: dict[int, list[R]] = defaultdict(list)
    for place, rank, row in placed:
        if beyond is None or place < beyond:
            by_rank[rank].append(row)
    return {"by_rank": sorted(by_rank.items(), key=lambda item: item[0]), "beyond": beyond}
