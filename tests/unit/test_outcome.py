# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What one rank's step came to: its value, or its error named as all ranks will raise it."""

import logging
from typing import Any

import pytest

from mbridge_fsdp_ckpt.coordination.outcome import Outcome
from mbridge_fsdp_ckpt.errors import CheckpointError, InternalError, KeyMismatchError, RankFailedError, StorageError


def failing(error: Exception) -> Outcome[Any]:
    def fail() -> None:
        raise error

    return Outcome.of(fail, 3, "writing chunks")


def test_a_value_is_announced_and_then_used() -> None:
    outcome = Outcome.of(lambda: [1, 2], 3, "planning the save")
    assert outcome.message(len) == 2
    assert outcome.brought == outcome.value == [1, 2]


@pytest.mark.parametrize(
    ("error", "kind", "logged"),
    [
        (KeyMismatchError(expected="keys", found="none", remedy="Look."), KeyMismatchError, False),
        (OSError(28, "No space left on device"), StorageError, True),
        (ZeroDivisionError("by zero"), RankFailedError, True),
    ],
)
def test_an_error_is_brought_with_rank_and_phase(
    error: Exception, kind: type[CheckpointError], logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = failing(error)
    assert type(outcome.brought) is kind
    assert outcome.brought.rank == 3
    assert "writing chunks" in str(outcome.brought)
    assert outcome.message(len) is outcome.brought, "nothing is announced of it"
    traces = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in traces] == ["rank 3 failed while writing chunks"] * logged


def test_the_next_step_is_taken_on_a_value_alone() -> None:
    taken: list[int] = []
    assert Outcome.of(lambda: 4, 3, "planning the save").then(lambda value: value + 1, 3, "reading").value == 5
    failed = failing(ZeroDivisionError("by zero"))
    assert failed.then(taken.append, 3, "reading").brought is failed.brought
    assert taken == []
    then = Outcome.of(lambda: 0, 3, "planning the save").then(lambda value: 1 // value, 3, "reading")
    assert "reading" in str(then.brought), "its own phase"


def test_a_value_that_there_is_not_is_no_value() -> None:
    outcome = failing(ZeroDivisionError("by zero"))
    with pytest.raises(InternalError, match=r"expected a meeting .* by zero") as caught:
        _ = outcome.value
    assert caught.value.__cause__ is outcome.brought


def test_an_interrupt_is_no_outcome() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Outcome.of(interrupted, 0, "writing chunks")
