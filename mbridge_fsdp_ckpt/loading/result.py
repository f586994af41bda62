# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a load returns besides filling model and optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from mbridge_fsdp_ckpt.coordination.outcome import Outcome
from mbridge_fsdp_ckpt.coordination.rounds import Round
from mbridge_fsdp_ckpt.errors import CheckpointError, ErrorData, LoadInterruptedError
from mbridge_fsdp_ckpt.format.source import RankRecord
from mbridge_fsdp_ckpt.loading import exchange
from mbridge_fsdp_ckpt.loading.match import NAMED
from mbridge_fsdp_ckpt.phases import Phases


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a load returns besides filling model and optimizer.

    Args:
        values: The non-tensor state that `save` was given as `values`, by name.
        topology: The sizes of the saving job, by name, and its sharding strategy.
        own: The record of the saving rank that had this rank's coordinates; None if there was none.
        nearest: The record of one saving rank with this rank's place in pipeline and tensor parallelism: `own` where
            there is that; None if there was none.
        skipped: Keys that were allowed to be missing, or to stay unread; of what other ranks found, the first 20.
        bytes: Bytes of payload that this rank read, each counted once.  `accept` sees 0 here, and defaults below.
        bytes_of_all: Bytes of payload that all ranks read.
        seconds: Seconds by phase, in order: open (and match with the live model), agree (meetings), read (and verify),
            exchange (with ranks that read for each other), fill, refresh (the compute weights).
        duration: Seconds from the call to its end.
        unknown_slots: Names of optimizer slots that may be copies of weights, as far as this package knows, and that
            the load left as they were although it changed the weights, or filled with zeros where the checkpoint lacks
            elements.
    """

    values: Mapping[str, Any]
    topology: Mapping[str, int | str]
    own: RankRecord | None
    nearest: RankRecord | None
    skipped: tuple[str, ...] = field(default=())
    bytes: int = 0
    bytes_of_all: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    duration: float = 0.0
    unknown_slots: tuple[str, ...] = field(default=())

    def warnings(self) -> list[str]:
        """What a user should know of the load, one sentence each; rank 0 has logged them."""
        said = []
        if self.skipped:
            said.append(f"Not in the checkpoint, or not read, as allowed: {', '.join(self.skipped[:NAMED])}.")
        if self.unknown_slots:
            said.append(
                f"The optimizer keeps {', '.join(self.unknown_slots)}. It is not known whether they are copies of "
                "weights, so the load did not set them. If they are, clear the optimizer's state: otherwise its next "
                "step undoes the load."
            )
        return said

    def with_results(self, skipped: Iterable[str], filled: Filled, read: int, phases: Phases) -> LoadResult:
        """The same of a load that is done.

        Args:
            skipped: Of all ranks.
            filled: What all ranks said at the end.
            read: Bytes that this rank read.
            phases: The load's clock.
        """
        return replace(
            self,
            skipped=tuple(sorted({*self.skipped, *skipped})),
            bytes=read,
            bytes_of_all=filled["bytes"],
            seconds=phases.seconds,
            duration=phases.elapsed,
            unknown_slots=tuple(filled["unknown_slots"]),
        )


class Filled(TypedDict):
    """A rank's message when it is through, or several ranks'.

    Args:
        lost: The error of a rank that lost those that read for it.
        bytes: That were read.
        unknown_slots: The first 20 of `LoadResult.unknown_slots`.
    """

    lost: ErrorData | None
    bytes: int
    unknown_slots: list[str]


@dataclass(slots=True)
class Completion(Round[Filled, Filled]):
    """Second meeting of a load: has every rank filled what it had read and verified?"""

    filled: Outcome[None]
    read: int
    unknown_slots: list[str]
    phase = "completion of the load"

    def message(self) -> Filled | CheckpointError:
        """What this rank says when it is through."""
        return exchange.message(
            self.filled, lambda lost: Filled(lost=lost, bytes=self.read, unknown_slots=self.unknown_slots)
        )

    def combine(self, messages: list[Filled]) -> Filled:
        """What several ranks say."""
        lost = exchange.first([message["lost"] for message in messages])
        slots = sorted({slot for message in messages for slot in message["unknown_slots"]})[:NAMED]
        return {"lost": lost, "bytes": sum(message["bytes"] for message in messages), "unknown_slots": slots}

    def decide(self, whole: Filled) -> Filled:
        """What all ranks say together, unless one lost those that read for it."""
        exchange.decide(whole["lost"])
        return whole


def interrupted(error: CheckpointError) -> CheckpointError:
    """What fails a load after live tensors had begun to change."""
    return LoadInterruptedError(
        expected="all ranks to fill what they had verified",
        found=str(error),
        remedy="Model and optimizer are partly loaded: end this process and load again.",
        rank=error.rank,
        key=error.key,
        host=error.host,
        phase=error.phase,
    )
