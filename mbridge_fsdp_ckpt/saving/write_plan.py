# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What one rank is about to write, as data, without the elements of its tensors; and how ranks compare it."""

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
        blocks: All blocks that the rank holds and that count for the plan, also those that other ranks write.
        keys: The descriptions of all keys for which the rank writes rows.
        numbers: The scalars of all parameters of which the rank holds a part, whichever rank declares them.
        fingerprint: The sums of the blocks, by bucket, which ranks add up.
        said: The content of the rank's index file besides keys, files and times.
        hyperparameters: The hyperparameters of the rank's parameters, encoded, by checksum.
        sections: The sections that are saved.
        topology: The parallel sizes of the running job, by name, and how Megatron-FSDP shards the model.
        copies: Hashes of blocks that other ranks hold, too, collected while the rank writes.
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
        """The numbers of the blocks that the rank writes to its payload file."""
        return [number for number, block in enumerate(self.blocks) if block.writes and not block.is_scalar]

    def compared(self, choice: str) -> list[int]:
        """The numbers of the blocks that other ranks write, and that are compared with theirs.

        Args:
            choice: `Settings.replicas`.
        """
        others = (number for number, block in enumerate(self.blocks) if not (block.writes or block.is_scalar))
        return [number for number in others if replicas.is_compared(self.blocks[number], choice)]


class Elements(Protocol):
    """The elements of a rank's blocks, read from live tensors or from staging memory."""

    def each(self, numbers: Sequence[int]) -> Iterator[Iterable[Buffer]]:
        """The bytes of each block that the rank writes, in pieces, on the host.  Called once, for `WritePlan.chunks`.

        The caller takes all pieces of one block before it asks for the next one.
        """
        ...

    def digests(self, numbers: Sequence[int]) -> Iterator[int]:
        """The hashes of blocks that other ranks write.  Called once, after `each` is exhausted."""
        ...


class Announced(TypedDict):
    """The message of one rank to the comparison of plans, or of several ranks combined.

    Args:
        fingerprint: The sums of blocks, by bucket.
        sections: Each different list of sections that a rank saves.
    """

    fingerprint: list[int]
    sections: list[list[Section]]


class PlansDecided(TypedDict):
    """The coordinator's decision of the comparison of plans.

    Args:
        sums: The sums of all ranks' blocks, by bucket, if they are not zero; else empty.
        place: Where all ranks write; None if sums are not zero, and blocks have to be compared one by one.
    """

    sums: list[int]
    place: Place | None


@dataclass(slots=True)
class PlanComparison(Round[Announced, PlansDecided]):
    """First meeting of a save: do the plans of all ranks tile every tensor?

    Args:
        planned: The write plan of this rank, or the error that it failed with.
        begin: Makes the staging directory; called on rank 0.
    """

    planned: Outcome[WritePlan]
    begin: Callable[[], Place]
    phase = "comparison of plans"

    def message(self) -> Announced | CheckpointError:
        """The sums of this rank's blocks, and its sections."""
        return self.planned.message(lambda own: Announced(fingerprint=own.fingerprint, sections=[list(own.sections)]))

    def combine(self, messages: list[Announced]) -> Announced:
        """The sums of several ranks' blocks, and their sections."""
        sections = {tuple(one) for message in messages for one in message["sections"]}
        return {
            "fingerprint": added(message["fingerprint"] for message in messages),
            "sections": [list(one) for one in sorted(sections)],
        }

    def decide(self, whole: Announced) -> PlansDecided:
        """Make the staging directory if the sums of all plans are zero."""
        if len(whole["sections"]) > 1:
            raise ConfigurationError(
                expected="all ranks to save the same sections",
                found=" on some ranks, and on others ".join(", ".join(one) or "none" for one in whole["sections"]),
                remedy="Pass the optimizer on every rank, or on none.",
            )
        if any(whole["fingerprint"]):
            return {"sums": whole["fingerprint"], "place": None}
        return {"sums": [], "place": self.begin()}
