# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Rows that ranks name: never more than the bound, and of each key all or none, however the ranks are grouped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from mbridge_fsdp_ckpt.coverage import buckets
from mbridge_fsdp_ckpt.coverage.buckets import BUCKETS, RowRound

RANKS = st.lists(st.lists(st.sampled_from("abcdef"), max_size=8), min_size=1, max_size=5)


@dataclass(frozen=True)
class Letter:
    key: str
    share: int = 1

    @property
    def place(self) -> tuple[bool, str]:
        return place(self.key)

    def to_wire(self) -> str:
        return self.key

    @classmethod
    def from_wire(cls, row: str) -> Letter:
        return cls(row)


class Letters(RowRound[Letter, None]):
    phase, kind = "letters", Letter

    def check(self, held: list[tuple[int, Letter]], *, all_named: bool) -> None: ...


def place(row: str) -> tuple[bool, str]:
    return row > "c", row


def combined(ranks: Sequence[Sequence[str]], group: int) -> dict[str, Any]:
    """On a tree in which so many come together at once; as data that passed through the store."""
    rounds = [Letters(rank, map(Letter, own), [1] * BUCKETS, lambda: None) for rank, own in enumerate(ranks)]
    messages: list[Any] = [one.message() for one in rounds]
    while len(messages) > 1:
        groups = [messages[first : first + group] for first in range(0, len(messages), group)]
        messages = [json.loads(json.dumps(rounds[0].combine(one))) for one in groups]
    found: dict[str, Any] = messages[0]
    return found


@given(RANKS, st.integers(1, 8), st.integers(1, 12), st.integers(2, 5))
def test_of_each_key_that_is_named_every_rows_is_there(
    ranks: list[list[str]], of_one: int, in_all: int, group: int
) -> None:
    with patch.object(buckets, "OF_ONE_RANK", of_one), patch.object(buckets, "IN_ALL", in_all):
        named = combined(ranks, group)
    found: dict[int, list[str]] = dict(named["by_rank"])
    assert sum(map(len, found.values())) <= in_all or len(ranks) == 1
    end = named["beyond"] and tuple(named["beyond"])
    for rank, own in enumerate(ranks):
        assert found.get(rank, []) == sorted((row for row in own if not end or place(row) < end), key=place)
    if sum(map(len, ranks)) <= min(of_one, in_all):
        assert end is None
