# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What one rank is about to write, as data: all of it but the elements of its tensors."""

from __future__ import annotations

from collections.abc import Buffer, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypedDict

from mbridge_fsdp_ckpt.coverage import plans, replicas
from mbridge_fsdp_ckpt.coverage.plans import Block, BlockRow
from mbridge_fsdp_ckpt.coverage.replicas import Copy, CopyRow
from mbridge_fsdp_ckpt.coverage.rows import Rows
from mbridge_fsdp_ckpt.format.own_index import RankIndex
from mbridge_fsdp_ckpt.format.rows import Scalar
from mbridge_fsdp_ckpt.io.files import Json
from mbridge_fsdp_ckpt.plan.keys import KeyEntry, Section


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
    topology: dict[str, int | str]


def announce(write_plan: WritePlan) -> Announced:
    """The bounded message for the coordination."""
    return {
        "fingerprint": write_plan.fingerprint,
        "sections": [list(write_plan.sections)],
        "topology": write_plan.topology,
    }


def combine(messages: list[Announced]) -> Announced:
    """What several ranks announce, as one message; the topology is the first one's."""
    return {
        "fingerprint": plans.added(message["fingerprint"] for message in messages),
        "sections": [list(one) for one in sorted({tuple(one) for message in messages for one in message["sections"]})],
        "topology": messages[0]["topology"],
    }


def disputed(rank: int, write_plan: WritePlan, buckets: Iterable[int]) -> Rows[BlockRow]:
    """This rank's blocks in the buckets that did not add up."""
    return plans.blocks_in(rank, write_plan.blocks, buckets)


def differing(rank: int, write_plan: WritePlan, buckets: Iterable[int]) -> Rows[CopyRow]:
    """This rank's hashes of copies in the buckets that did not add up."""
    return replicas.copies_in(rank, write_plan.copies, buckets)
