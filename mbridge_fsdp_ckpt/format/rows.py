# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What an index has of each key: chunks in payload files, or one number."""

from __future__ import annotations

from dataclasses import dataclass

from mbridge_fsdp_ckpt.io.ranges import ByteRange
from mbridge_fsdp_ckpt.plan.boxes import Box


@dataclass(frozen=True, slots=True)
class Chunk:
    """One box of one key in the writing rank's payload file.

    Args:
        key: The key.
        box: Which block of the key, or which part of a large one; see `plan.records`.
        record: What `torch.save` wrote, the raw elements in it, which stock DCP reads, and its sums; see `sums`.
        lead: Bytes of the record before the raw elements, which are row-major and little-endian.
        size: Bytes of the raw elements.
        checksum: The 64-bit checksum of the record, or of its sums.
    """

    key: str
    box: Box
    record: ByteRange
    lead: int
    size: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Scalar:
    """One number of a parameter: its bytes stand in the index, a record of its own would be a hundred times as long.

    Args:
        key: The key.
        data: The bytes of the element, little-endian.
        counts: Whether it is the one that the checkpoint has; else a copy, which spares its rank to look for that one.
    """

    key: str
    data: bytes
    counts: bool = True

    @property
    def box(self) -> Box:
        """All of the key."""
        return Box((), ())


Row = Chunk | Scalar
