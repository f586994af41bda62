# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks ask for, combined: exact for every key, in as many meetings as it takes to keep each message small."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mbridge_fsdp_ckpt.errors import ErrorData, KeyMismatchError, RankMissingError
from mbridge_fsdp_ckpt.loading.key_check import Asked, KeyCheck, UnexpectedKeys, at_a_time

NONE: Any = None
CHECK, NAMED = KeyCheck(NONE, NONE), UnexpectedKeys(NONE, [])
"""The first meeting, and the one that names keys, of a checkpoint that is not asked."""


@pytest.mark.parametrize(
    ("keys", "replicas", "at_once"),
    [
        (0, 1, 256),
        (1000, 4, 256),
        (8192, 256, 256),
        (8193, 1, 255),
        (370_000, 2, 5),
        (370_000, 16_384, 1),
        (10_000_000, 1, 1),
    ],
)
def test_as_many_buckets_at_a_time_as_one_message_takes(keys: int, replicas: int, at_once: int) -> None:
    groups = list(at_a_time(range(256), keys, replicas))
    assert [bucket for group in groups for bucket in group] == list(range(256))
    assert len(groups[0]) == at_once


def test_replicas_that_ask_are_told_apart_and_one_that_asks_twice_is_seen() -> None:
    first = NAMED.combine([{"a": ("1", False, False), "b": ("2", False, True)}, {"a": ("2", False, False)}])
    assert first == {"a": ("3", False, False), "b": ("2", False, True)}
    again = NAMED.combine([first, {"a": ("4", False, False), "b": ("2", False, False)}])
    second = json.loads(json.dumps(again))
    assert second == {"a": ["7", False, False], "b": ["2", True, True]}
    assert NAMED.combine([{}, second])["b"] == ("2", True, True), "what was seen below is not forgotten"


def test_a_key_that_is_there_and_that_nobody_asks_for_is_unexpected() -> None:
    asked = NAMED.combine([{"a": ("0", False, True)}, {"a": ("1", False, False), "b": ("0", False, True)}])
    with pytest.raises(KeyMismatchError, match="1 unexpected: b"):
        NAMED.decide(asked)
    NAMED.decide({"a": asked["a"], "c": ("2", False, False)})


def lost_at(rank: int) -> ErrorData:
    return RankMissingError(expected="ranks to read for each other", found="none", remedy="", rank=rank).to_wire()


def test_checkpoints_that_ranks_opened_are_all_named_up_to_a_bound() -> None:
    messages: list[Asked] = [
        {
            "checkpoints": [str(n // 2)],
            "asked": [1, 2],
            "slots": n,
            "replicas": n,
            "skipped": [f"key {n:02}"],
            "lost": lost_at(n) if n > 5 else None,
        }
        for n in range(40)
    ]
    whole = CHECK.combine(messages)
    assert whole["asked"] == [40, 80]
    assert whole["replicas"] == 39
    assert len(whole["checkpoints"]) == 8
    assert whole["skipped"] == [f"key {n:02}" for n in range(20)]
    assert CHECK.combine(messages[:2])["checkpoints"] == ["0"]
    assert whole["lost"] == lost_at(6), "of ranks that lost their peers the first is named"
    assert CHECK.combine(messages[:2])["lost"] is None
