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
        values: The non-tensor state that was passed to `save` as `values`, by name.
        topology: The parallel sizes of the saving job, by name, and its sharding strategy.
        own: The record of the saving rank that had this rank's coordinates; None if there was none.
        nearest: The record of a saving rank with this rank's pipeline- and tensor-parallel rank: the same as `own`
            unless that is None; None if there was no such rank.
        skipped: Keys that are missing from the checkpoint, or stayed unread, as `settings` allows: all that this rank
            found, and the first 20 that other ranks found.
        bytes: Bytes of payload that this rank read, each counted once.  When `accept` is called, this field is 0, and
            the fields below have their defaults.
        bytes_of_all: Bytes of payload that all ranks read.
        seconds: Seconds by phase, in order: open (and match with the live model), agree (meetings), read (and verify),
            exchange (with ranks that read for each other), fill, refresh (the compute weights).
        duration: Seconds from the call of the load to its return.
        unknown_slots: Names of optimizer slots that may be copies of weights and do not match the loaded weights.  The
            package knows only statistics such as `exp_avg`, and fp32 copies of weights.  Other slots do not match where
            weights were loaded without optimizer state, or where the checkpoint lacks elements, which became zero.
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
        """Warnings about the load, one text each.  Rank 0 has logged them."""
        texts = []
        if self.skipped:
            texts.append(f"Not in the checkpoint, or not read, as allowed: {', '.join(self.skipped[:NAMED])}.")
        if self.unknown_slots:
            texts.append(
                f"The optimizer keeps {', '.join(self.unknown_slots)}. It is not known whether they are copies of "
                "weights, so the load did not set them. If they are, clear the optimizer's state: otherwise its next "
                "step undoes the load."
            )
        return texts

    def with_results(self, skipped: Iterable[str], filled: Filled, read: int, phases: Phases) -> LoadResult:
        """This result, completed once the load is done.

        Args:
            skipped: The first 20 keys that ranks skipped.
            filled: The messages of all ranks to the second meeting, combined.
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
    """The message of one rank once it has filled its tensors, or of several ranks combined.

    Args:
        lost: The error of a rank that lost the ranks that read for it; None where there is none.
        bytes: Bytes of payload that were read.
        unknown_slots: The first 20 of `LoadResult.unknown_slots`.
    """

    lost: ErrorData | None
    bytes: int
    unknown_slots: list[str]


@dataclass(slots=True)
class Completion(Round[Filled, Filled]):
    """Second meeting of a load: has every rank filled its tensors?

    Args:
        filled: Whether this rank filled its tensors, or the error that it failed with.
        read: Bytes of payload that this rank read.
        unknown_slots: See `LoadResult.unknown_slots`; the first 20.
    """

    filled: Outcome[None]
    read: int
    unknown_slots: list[str]
    phase = "completion of the load"

    def message(self) -> Filled | CheckpointError:
        """The message of this rank, or the error that it failed with."""
        return exchange.message(
            self.filled, lambda lost: Filled(lost=lost, bytes=self.read, unknown_slots=self.unknown_slots)
        )

    def combine(self, messages: list[Filled]) -> Filled:
        """The messages of several ranks, combined."""
        lost = exchange.first([message["lost"] for message in messages])
        slots = sorted({slot for message in messages for slot in message["unknown_slots"]})[:NAMED]
        return {"lost": lost, "bytes": sum(message["bytes"] for message in messages), "unknown_slots": slots}

    def decide(self, whole: Filled) -> Filled:
        """The messages of all ranks, unless a rank lost the ranks that read for it."""
        exchange.decide(whole["lost"])
        return whole


def interrupted(error: CheckpointError) -> CheckpointError:
    """The error for a load that failed after it had begun to change live tensors."""
    return LoadInterruptedError(
        expected="all ranks to fill what they had verified",
        found=str(error),
        remedy="Model and optimizer are partly loaded: end this process and load again.",
        rank=error.rank,
        key=error.key,
        host=error.host,
        phase=error.phase,
    )
