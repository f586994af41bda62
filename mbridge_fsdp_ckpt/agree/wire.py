"""What crosses between ranks: messages and verdicts as bounded data, and errors in their place."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TypedDict

from mbridge_fsdp_ckpt.errors import CheckpointError, ErrorData, InternalError, describe_unexpected

type Judge[M, V] = Callable[[list[M]], V]
"""Called on rank 0 with all messages, by rank; its answer, or the error it raises, is everybody's."""

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


def judged[M, V](wires: Sequence[Wire[M]], judge: Judge[M, V], phase: str) -> Wire[V]:
    """The verdict, as data: a rank's error, the judge's answer, or whatever the judge raised."""
    for wire in wires:
        if "failed" in wire:
            return {"failed": wire["failed"]}
    try:
        return _checked({"value": judge([wire["value"] for wire in wires])}, phase, 0)
    except CheckpointError as error:
        return {"failed": error.to_wire()}
    except Exception as error:
        return {"failed": describe_unexpected(error, rank=0, doing=phase).to_wire()}
