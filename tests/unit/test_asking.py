"""What ranks ask for, combined: exact for every key, in as many meetings as it takes to keep each message small."""

from __future__ import annotations

import json

import pytest

from mbridge_fsdp_ckpt.loading import asking
from mbridge_fsdp_ckpt.loading.asking import Asked


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
    groups = list(asking.at_a_time(range(256), keys, replicas))
    assert [bucket for group in groups for bucket in group] == list(range(256))
    assert len(groups[0]) == at_once


def test_replicas_that_ask_are_told_apart_and_one_that_asks_twice_is_seen() -> None:
    first = asking.combine_named([{"a": ("1", False), "b": ("2", False)}, {"a": ("2", False)}])
    assert first == {"a": ("3", False), "b": ("2", False)}
    second = json.loads(json.dumps(asking.combine_named([first, {"a": ("4", False), "b": ("2", False)}])))
    assert second == {"a": ["7", False], "b": ["2", True]}
    assert asking.combine_named([{}, second])["b"] == ("2", True), "what was seen below is not forgotten"


def test_checkpoints_that_ranks_opened_are_all_named_up_to_a_bound() -> None:
    messages: list[Asked] = [{"checkpoints": [str(n // 2)], "asked": [1, 2], "replicas": n} for n in range(40)]
    whole = asking.combine(messages)
    assert whole["asked"] == [40, 80]
    assert whole["replicas"] == 39
    assert len(whole["checkpoints"]) == 8
    assert asking.combine(messages[:2])["checkpoints"] == ["0"]
