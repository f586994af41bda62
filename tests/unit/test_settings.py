# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Choices that a user may make, and those that are refused by name."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.loading import budget
from mbridge_fsdp_ckpt.settings import AUTO_DCP_CHUNKS, LEAST_STAGING, Settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dcp_metadata", "sometimes"),
        ("dcp_metadata", None),
        ("verify", "none"),
        ("verify", True),
        ("commit", "copy"),
        ("read_buffer", -1),
        ("share_reads", "sometimes"),
        ("time_limit", "120"),
        ("time_limit", True),
        ("storage_limit", float("inf")),
        ("storage_limit", None),
        ("staging_limit", 1e9),
        ("vocabulary_size", "32000"),
    ],
)
def test_an_unknown_choice_is_refused_by_name(name: str, value: Any) -> None:
    choice: dict[str, Any] = {name: value}
    with pytest.raises(ConfigurationError, match=name) as caught:
        Settings(**choice)
    assert repr(value) in caught.value.found


@pytest.mark.parametrize(
    ("choice", "chunks", "written"),
    [
        ("auto", 1, True),
        ("auto", AUTO_DCP_CHUNKS, True),
        ("auto", AUTO_DCP_CHUNKS + 1, False),
        ("always", 5_120_000, True),
        ("never", 1, False),
    ],
)
def test_when_stocks_view_is_written(choice: Any, chunks: int, written: bool) -> None:
    assert Settings(dcp_metadata=choice).writes_dcp_metadata(chunks) is written


def test_a_quarter_of_what_is_free_is_kept_shared_by_the_hosts_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    monkeypatch.setattr(budget, "_available_memory", lambda: 64_000)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert budget.read_budget(Settings()) == 16_000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert budget.read_budget(Settings()) == 2_000
    for chosen in (5, 0):
        assert budget.read_budget(Settings(read_buffer=chosen)) == chosen


def test_free_memory_is_read_from_the_kernel() -> None:
    from mbridge_fsdp_ckpt.loading.budget import _available_memory

    assert 1 << 26 < _available_memory() < 1 << 50


@pytest.mark.parametrize(
    ("patterns", "key", "matches"),
    [
        ((), "model.a", False),
        (("model.*",), "model.a", True),
        (("model.*",), "Model.a", False),
        (("*.b",), "c.b", True),
    ],
)
def test_patterns_of_keys(patterns: tuple[str, ...], key: str, matches: bool) -> None:
    settings = Settings(allow_missing=patterns, allow_unexpected=patterns)
    assert settings.may_be_missing(key) is matches
    assert settings.may_be_unexpected(key) is matches


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("time_limit", np.float32(1.5), 1.5),
        ("storage_limit", np.int64(5), 5.0),
        ("staging_limit", np.int64(LEAST_STAGING), LEAST_STAGING),
        ("read_buffer", np.uint8(7), 7),
        ("vocabulary_size", np.int32(9), 9),
    ],
)
def test_numbers_of_numpys_are_kept_as_pythons(name: str, value: Any, kept: float) -> None:
    found = getattr(Settings(**{name: value}), name)
    assert (found, type(found)) == (kept, type(kept))
    assert json.loads(json.dumps(found)) == kept
