# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""One meeting of all ranks as one object, and the data that crosses between ranks: bounded messages, or errors."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

from mbridge_fsdp_ckpt.errors import CheckpointError, ErrorData, InternalError, describe_unexpected

_MAX_BYTES = 6 << 20  # the store closes the connection of who sends 8 MiB


class Round[M, V](ABC):
    """One meeting of all ranks: what a rank brings, how messages combine, what rank 0 decides.

    Messages and decisions are JSON-able and bounded, however many ranks there are; tuples arrive as lists.
    """

    __slots__ = ()
    phase: str
    """What the meeting is for, in errors."""

    @abstractmethod
    def message(self) -> M | CheckpointError:
        """The message of this rank, or the error that it failed with, which all ranks then raise."""

    @abstractmethod
    def combine(self, messages: list[M]) -> M:
        """Combine this rank's own message and those of the ranks below it, which are combined already, into one.

        Called on every rank, perhaps with one message.  The result must not depend on how ranks are grouped.
        """

    @abstractmethod
    def decide(self, whole: M) -> V:
        """Decide, on rank 0, from all messages combined.  All ranks return what it returns, or raise what it raises."""


@dataclass(frozen=True, slots=True)
class Arrival(Round[None, Any]):
    """A meeting without messages: it passes once all ranks have arrived, and fails with the error of one that failed.

    Args:
        phase: What the meeting is for, in errors.
        failed: The error that this rank failed with; None where it did not.
    """

    phase: str
    failed: CheckpointError | None

    def message(self) -> CheckpointError | None:
        """See `Round`."""
        return self.failed

    def combine(self, messages: list[None]) -> None:
        """See `Round`."""

    def decide(self, whole: None) -> None:
        """See `Round`."""


class Wire[T](TypedDict, total=False):
    """The data that crosses between ranks: exactly one of the two keys.

    Args:
        value: A message or a decision.
        failed: An error in its place.
    """

    value: T
    failed: ErrorData


def brought[M](round: Round[M, Any], rank: int) -> Wire[M]:
    """The message of a rank, or the error that it failed with, as data."""
    try:
        message = round.message()
    except Exception as error:  # the other ranks must not wait for one that fails at its own message
        message = describe_unexpected(error, rank=rank, doing=round.phase)
    if isinstance(message, CheckpointError):
        return {"failed": message.to_wire()}
    return _checked({"value": message}, round.phase, rank)


def combined[M](round: Round[M, Any], messages: list[M], rank: int) -> Wire[M]:
    """Several messages combined into one, or the error that combining them raised, as data."""
    return _tried(lambda: round.combine(messages), round.phase, rank)


def decided[M, V](round: Round[M, V], whole: Wire[M]) -> Wire[V]:
    """The decision as data: what the coordinator returned or raised, or an error that a rank brought."""
    if "failed" in whole:
        return {"failed": whole["failed"]}
    return _tried(lambda: round.decide(whole["value"]), round.phase, 0)


def _checked[T](wire: Wire[T], phase: str, rank: int) -> Wire[T]:
    """The data, or an error in its place if it is not JSON-able, or too large for the store."""
    try:
        size = len(json.dumps(wire))
    except (TypeError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
    else:
        if size <= _MAX_BYTES:
            return wire
        found = f"{size} bytes"
    failure = InternalError(
        expected=f"a JSON message of at most {_MAX_BYTES} bytes at {phase!r}",
        found=found,
        remedy="Report it: ranks must exchange bounded JSON data.",
        rank=rank,
    )
    return {"failed": failure.to_wire()}


def _tried[T](action: Callable[[], T], phase: str, rank: int) -> Wire[T]:
    try:
        return _checked({"value": action()}, phase, rank)
    except CheckpointError as error:
        return {"failed": error.to_wire()}
    except (Exception, SystemExit) as error:  # a callback that leaves the program must not leave the others waiting
        return {"failed": describe_unexpected(error, rank=rank, doing=phase).to_wire()}
