# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What one rank's step came to, until a meeting tells whether all ranks got that far."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from mbridge_fsdp_ckpt.errors import CheckpointError, InternalError, describe_unexpected

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome[T]:
    """A value, or the error that this rank failed with: the next meeting raises it on all ranks.

    Args:
        brought: What to bring to that meeting where the value is the message.
    """

    brought: T | CheckpointError

    @classmethod
    def of(cls, action: Callable[[], T], rank: int, doing: str) -> Outcome[T]:
        """What the action gives or raises.

        Args:
            action: The step.
            rank: This rank.
            doing: What it is, in words that follow "while".
        """
        try:
            return cls(action())
        except Exception as error:
            if not isinstance(error, CheckpointError):
                _log.exception("rank %d failed while %s", rank, doing)
            return cls(describe_unexpected(error, rank=rank, doing=doing))

    def then[U](self, action: Callable[[T], U], rank: int, doing: str) -> Outcome[U]:
        """What the next step makes of the value, or the same error."""
        brought = self.brought
        if isinstance(brought, CheckpointError):
            return Outcome(brought)
        return Outcome.of(lambda: action(brought), rank, doing)

    @property
    def value(self) -> T:
        """The value, once a meeting has passed.

        Raises:
            InternalError: There is none: it was asked for before a meeting.
        """
        if isinstance(self.brought, CheckpointError):
            raise InternalError(
                expected="a meeting to have raised this rank's error",
                found=f"its value asked for all the same; the error: {self.brought}",
                remedy="Report it.",
            ) from self.brought
        return self.brought

    def message[M](self, announce: Callable[[T], M]) -> M | CheckpointError:
        """What to bring to the next meeting: what is announced of the value, or the error."""
        return self.brought if isinstance(self.brought, CheckpointError) else announce(self.brought)
