"""What crosses between ranks: messages and verdicts as bounded data, and errors in their place."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from mbridge_fsdp_ckpt.errors import CheckpointError, InternalError, describe_unexpected

Judge = Callable[[list[Any]], Any]

_MAX_BYTES = 6 << 20  # the store closes the connection of who sends 8 MiB


def to_wire(message: Any, phase: str, rank: int) -> dict[str, Any]:
    """What a rank brings, as data: its message, or the error it failed with."""
    if isinstance(message, CheckpointError):
        return {"failed": message.to_wire()}
    return _checked({"message": message}, phase, rank)


def _checked(wire: dict[str, Any], phase: str, rank: int) -> dict[str, Any]:
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


def judged(wires: list[dict[str, Any]], judge: Judge, phase: str) -> dict[str, Any]:
    """The verdict, as data: a rank's error, the judge's answer, or whatever the judge raised."""
    for wire in wires:
        if "failed" in wire:
            return wire
    try:
        return _checked({"answer": judge([wire["message"] for wire in wires])}, phase, 0)
    except CheckpointError as error:
        return {"failed": error.to_wire()}
    except Exception as error:
        return {"failed": describe_unexpected(error, rank=0, doing=phase).to_wire()}
