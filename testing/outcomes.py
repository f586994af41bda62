# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""How a case ends when not every rank returns a result."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Died:
    """The result of a rank that ended during the case: minus the signal that killed it, or its exit status."""

    returncode: int


class RankFailed(RuntimeError):  # noqa: N818 - reads as what happened
    """At least one rank raised or died.  `tracebacks` has one text per failed rank, the first to fail first."""

    def __init__(self, message: str, tracebacks: dict[int, str]) -> None:
        super().__init__(message)
        self.tracebacks = tracebacks


class RanksHung(RuntimeError):  # noqa: N818 - reads as what happened
    """The time limit passed.  `stacks` has the Python stacks of every rank that had not finished."""

    def __init__(self, message: str, stacks: dict[int, str]) -> None:
        super().__init__(message)
        self.stacks = stacks
