# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What crosses between ranks: messages and decisions as bounded data, and errors in their place."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypedDict

from mbridge_fsdp_ckpt.errors import CheckpointError, ErrorData, InternalError, describe_unexpected

type Deciding[M, V] = Callable[[M], V]
"""Called on rank 0 with the messages of all ranks, combined; its answer, or the error it raises, is everybody's."""

type Combining[M] = Callable[[list[M]], M]
"""One message of a rank's own and of others below it, which are combined already, by rank; called on every rank.

It may be called with one message, and must not depend on how ranks are grouped.
"""

_MAX_BYTES = 6 << 20  # the store closes the connection of who sends 8 MiB


class Wire[T](TypedDict, total=False):
    """Either of both.  Tuples arrive as lists."""

    value: T
    failed: ErrorData


def to_wire[M](message: M | CheckpointError, phase: str, rank: int) -> Wire[M]:
    """What a rank brings, as data: its message, or the error it failed with."""
    if isinstance(message, CheckpointError):
        return {"failed": message.to_wire()}
    return _checked({"value": message}, phase, rank)


def _checked[T](wire: Wire[T], phase: str, rank: int) -> Wire[T]:
    """The data, or an error in its place where the store cannot carry it."""
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
        remedy="This is a defect of the caller: what ranks exchange must be bounded data.",
        rank=rank,
    )
    return {"failed": failure.to_wire()}


def combined[M](messages: list[M], combine: Combining[M], phase: str, rank: int) -> Wire[M]:
    """One message of several, as data, or whatever went wrong with it."""
    return _tried(lambda: combine(messages), phase, rank)


def decided[M, V](wire: Wire[M], decide: Deciding[M, V], phase: str) -> Wire[V]:
    """The decision, as data: an error that a rank brought, or what the coordinator returned or raised."""
    return {"failed": wire["failed"]} if "failed" in wire else _tried(lambda: decide(wire["value"]), phase, 0)


def _tried[T](action: Callable[[], T], phase: str, rank: int) -> Wire[T]:
    try:
        return _checked({"value": action()}, phase, rank)
    except CheckpointError as error:
        return {"failed": error.to_wire()}
    except (Exception, SystemExit) as error:  # a callback that leaves the program must not leave the others waiting
        return {"failed": describe_unexpected(error, rank=rank, doing=phase).to_wire()}


def nothing(message: object) -> None:
    """Decides on, or combines, messages that say no more than that their rank has come."""
