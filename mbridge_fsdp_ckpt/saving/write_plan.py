# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What one rank is about to write, as data: all of it but the elements of its tensors; and how ranks compare it."""

from __future__ import annotations

from collections.abc import Buffer, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypedDict

from mbridge_fsdp_ckpt.coordination.outcome import Outcome
from mbridge_fsdp_ckpt.coordination.rounds import Round
from mbridge_fsdp_ckpt.coverage import replicas
from mbridge_fsdp_ckpt.coverage.buckets import added
from mbridge_fsdp_ckpt.coverage.plans import Block
from mbridge_fsdp_ckpt.coverage.replicas import Copy
from mbridge_fsdp_ckpt.errors import CheckpointError, ConfigurationError
from mbridge_fsdp_ckpt.format.own_index import RankIndex
from mbridge_fsdp_ckpt.format.rows import Scalar
from mbridge_fsdp_ckpt.io.files import Json
from mbridge_fsdp_ckpt.plan.keys import KeyEntry, Section
from mbridge_fsdp_ckpt.saving.commit import Place


@dataclass(slots=True)
class WritePlan:
    """What one rank is about to write.

    Args:
        blocks: All that it holds and that count for the plan, those that other ranks write among them.
        keys: The descriptions of all keys that it has rows of.
        numbers: Of all parameters that it holds a part of, whichever rank declares them.
        fingerprint: What the others learn of the blocks.
        said: What its index file says besides keys, files and times.
        hyperparameters: Of its parameters, encoded, by checksum.
        sections: What is saved.
        topology: Sizes of the running job, by name, and how Megatron-FSDP shards the model.
        copies: What it saw, while writing, of blocks that others hold, too.
    """

    blocks: list[Block]
    keys: dict[str, KeyEntry]
    numbers: list[Scalar]
    fingerprint: list[int]
    said: RankIndex
    hyperparameters: Mapping[int, dict[str, Json]]
    sections: tuple[Section, ...]
    topology: dict[str, int | str]
    copies: list[Copy] = field(default_factory=list)

    @property
    def chunks(self) -> list[int]:
        """The numbers of the blocks that it writes to its payload file."""
        return [number for number, block in enumerate(self.blocks) if block.writes and not block.is_scalar]

    def compared(self, choice: str) -> list[int]:
        """The numbers of the blocks that others write, and that are compared with theirs.

        Args:
            choice: `Settings.replicas`.
        """
        others = (number for number, block in enumerate(self.blocks) if not (block.writes or block.is_scalar))
        return [number for number in others if replicas.is_compared(self.blocks[number], choice)]


class Elements(Protocol):
    """Where the elements of a rank's blocks come from."""

    def each(self, numbers: Sequence[int]) -> Iterator[Iterable[Buffer]]:
        """The bytes of each block that it writes, in pieces, on the host; once, for all `WritePlan.chunks`.

        All pieces of one are taken before the next one is asked for.
        """
        ...

    def digests(self, numbers: Sequence[int]) -> Iterator[int]:
        """The hashes of blocks that other ranks write; once, after all of `each`."""
        ...


class Announced(TypedDict):
    """A rank's message for the comparison of plans; of several, all sections that they name."""

    fingerprint: list[int]
    sections: list[list[Section]]


class PlansDecided(TypedDict):
    """Where to write; or, for now, what plans add up to where that is not zero."""

    sums: list[int]
    place: Place | None


@dataclass(slots=True)
class PlanComparison(Round[Announced, PlansDecided]):
    """First meeting of a save: do the plans tile every tensor?

    Args:
        planned: What this rank writes, or why it can't.
        begin: Makes the staging directory, on rank 0.
    """

    planned: Outcome[WritePlan]
    begin: Callable[[], Place]
    phase = "comparison of plans"

    def message(self) -> Announced | CheckpointError:
        """What this rank announces, bounded."""
        return self.planned.message(lambda own: Announced(fingerprint=own.fingerprint, sections=[list(own.sections)]))

    def combine(self, messages: list[Announced]) -> Announced:
        """What several ranks announce."""
        sections = {tuple(one) for message in messages for one in message["sections"]}
        return {
            "fingerprint": added(message["fingerprint"] for message in messages),
            "sections": [list(one) for one in sorted(sections)],
        }

    def decide(self, whole: Announced) -> PlansDecided:
        """Make the staging directory if plans add up."""
        if len(whole["sections"]) > 1:
            raise ConfigurationError(
                expected="all ranks to save the same sections",
                found=" and ".join(map(", ".join, whole["sections"])),
                remedy="Pass the optimizer on every rank, or on none.",
            )
        if any(whole["fingerprint"]):
            return {"sums": whole["fingerprint"], "place": None}
        return {"sums": [], "place": self.begin()}
