# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Rows that ranks name: never more than the bound, and of each key all or none, however the ranks are grouped."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from mbridge_fsdp_ckpt.coverage import rows
from mbridge_fsdp_ckpt.coverage.rows import Rows, rows_of, together

RANKS = st.lists(st.lists(st.sampled_from("abcdef"), max_size=8), min_size=1, max_size=5)


def place(row: str) -> tuple[bool, str]:
    return row > "c", row


def combined(messages: list[Rows[str]], group: int) -> Rows[str]:
    """On a tree in which so many come together at once; as data that passed through the store."""
    while len(messages) > 1:
        groups = [messages[first : first + group] for first in range(0, len(messages), group)]
        messages = [json.loads(json.dumps(together(one, place))) for one in groups]
    return messages[0]


@given(RANKS, st.integers(1, 8), st.integers(1, 12), st.integers(2, 5))
def test_of_each_key_that_is_named_every_rows_is_there(
    ranks: list[list[str]], of_one: int, in_all: int, group: int
) -> None:
    with patch.object(rows, "OF_ONE_RANK", of_one), patch.object(rows, "IN_ALL", in_all):
        named: dict[str, Any] = dict(combined([rows_of(rank, own, place) for rank, own in enumerate(ranks)], group))
    found: dict[int, list[str]] = dict(named["by_rank"])
    assert sum(map(len, found.values())) <= in_all or len(ranks) == 1
    end = named["beyond"] and tuple(named["beyond"])
    for rank, own in enumerate(ranks):
        assert found.get(rank, []) == sorted((row for row in own if not end or place(row) < end), key=place)
    if sum(map(len, ranks)) <= min(of_one, in_all):
        assert end is None
