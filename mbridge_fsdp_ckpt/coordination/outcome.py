# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The value or the error of one rank's step, kept until a meeting tells whether the step succeeded on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from mbridge_fsdp_ckpt.errors import CheckpointError, InternalError, describe_unexpected

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome[T]:
    """A value, or the error that this rank failed with, which the next meeting raises on all ranks.

    Args:
        brought: The value, or the error.
    """

    brought: T | CheckpointError

    @classmethod
    def of(cls, action: Callable[[], T], rank: int, doing: str) -> Outcome[T]:
        """Call an action, and keep what it returns or raises.

        Args:
            action: The step.
            rank: This rank.
            doing: What the step does, in words that follow "while".
        """
        try:
            return cls(action())
        except Exception as error:
            if not isinstance(error, CheckpointError):
                _log.exception("rank %d failed while %s", rank, doing)
            return cls(describe_unexpected(error, rank=rank, doing=doing))

    def then[U](self, action: Callable[[T], U], rank: int, doing: str) -> Outcome[U]:
        """The outcome of the next step, which is given the value; the same error where there is no value."""
        brought = self.brought
        if isinstance(brought, CheckpointError):
            return Outcome(brought)
        return Outcome.of(lambda: action(brought), rank, doing)

    @property
    def value(self) -> T:
        """The value, once a meeting has passed.

        Raises:
            InternalError: This rank failed, and no meeting has raised its error before.
        """
        if isinstance(self.brought, CheckpointError):
            raise InternalError(
                expected="a meeting to have raised this rank's error",
                found=f"a step that uses the rank's value although it failed with: {self.brought}",
                remedy="Report it with the rank's log.",
            ) from self.brought
        return self.brought

    def message[M](self, announce: Callable[[T], M]) -> M | CheckpointError:
        """This rank's message to the next meeting, made from the value by `announce`, or its error."""
        return self.brought if isinstance(self.brought, CheckpointError) else announce(self.brought)
