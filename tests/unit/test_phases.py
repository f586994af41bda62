# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The clock of a save or load, and the line that a log has of it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mbridge_fsdp_ckpt.phases import Phases, line, rate
from mbridge_fsdp_ckpt.saving.result import SaveResult

FIELD = re.compile(r'([a-z_]+)=("(?:[^"\\]|\\.)*"|[^ "]+)(?: |$)')


def taken_apart(text: str) -> tuple[str, dict[str, Any]]:
    """A line by the rule of docs/performance.md: a word, then name=value; a value in quotes is a JSON string."""
    word, _, rest = text.partition(" ")
    found = FIELD.findall(rest)
    assert "".join(f"{name}={value} " for name, value in found).strip() == rest, "something is left over"
    return word, {name: json.loads(value) if value.startswith('"') else value for name, value in found}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock that stands still unless it is told otherwise."""
    now = [100.0]
    with monkeypatch.context() as patches:
        patches.setattr(time, "monotonic", lambda: now[0])
        patches.setattr(time, "time", lambda: 1_700_000_000.0 + now[0])
        yield now


@contextmanager
def passing(now: list[float], seconds: float) -> Iterator[None]:
    yield
    now[0] += seconds


def test_phases_add_up_by_name_in_the_order_they_came(clock: list[float]) -> None:
    phases = Phases()
    clock[0] += 1.0
    for name, seconds in (("plan", 0.5), ("agree", 2.0), ("plan", 0.25)):
        with phases(name), passing(clock, seconds):
            pass
    assert phases.begun == 1_700_000_100.0
    assert phases.elapsed == 3.75
    assert list(phases.seconds.items()) == [("plan", 0.75), ("agree", 2.0)]
    assert phases.ended == [("plan", 1.0, 0.5), ("agree", 1.5, 2.0), ("plan", 3.5, 0.25)]


def test_a_phase_that_fails_counts_and_what_it_raised_goes_on(clock: list[float]) -> None:
    phases = Phases()

    def fail() -> None:
        with phases("write"):
            clock[0] += 1.5
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert phases.seconds == {"write": 1.5}


def test_what_is_written_has_whole_microseconds(clock: list[float]) -> None:
    phases = Phases()
    with phases("write"), passing(clock, 1.23456789):
        pass
    assert [tuple(phase) for phase in phases.rounded] == [("write", 0.0, 1.234568)]


def test_a_line_has_everything() -> None:
    saved = SaveResult(500_000_000, 2_000_000_000, {"plan": 0.0123, "write": 0.75}, 0.8, 0.8)
    text = line("save", "/run/iter_0000010", saved)
    assert text == (
        "save directory=/run/iter_0000010 bytes=2000000000 rank_bytes=500000000 seconds=0.800 gb_per_s=2.500 "
        "plan=0.012 write=0.750"
    )
    assert rate(saved) == pytest.approx(2.5)


def test_nothing_in_no_time_is_no_rate() -> None:
    assert rate(SaveResult(0, 0, {}, 0.0, 0.0)) == 0.0


@given(st.text())
def test_a_line_can_be_taken_apart_whatever_a_path_is_called(directory: str) -> None:
    text = line("load", directory, SaveResult(1, 2, {"read": 1.0}, 2.0, 2.0))
    assert text.isascii()
    assert text.isprintable()
    word, fields = taken_apart(text)
    assert word == "load"
    assert fields["directory"] == directory
    assert list(fields) == ["directory", "bytes", "rank_bytes", "seconds", "gb_per_s", "read"]


@pytest.mark.parametrize(
    ("directory", "said"),
    [
        ("s3://bucket/run/iter_0000010", "s3://bucket/run/iter_0000010"),
        ("/with a blank", '"/with a blank"'),
        ("/a=b", '"/a=b"'),
        ("", '""'),
        ("/x\n2026 save directory=/y", '"/x\\n2026 save directory=/y"'),
        ("/ü", '"/\\u00fc"'),
    ],
)
def test_what_is_no_plain_text_is_a_json_string(directory: str, said: str) -> None:
    assert f" directory={said} " in f"{line('save', directory, SaveResult(0, 0, {}, 1.0, 1.0))} "
