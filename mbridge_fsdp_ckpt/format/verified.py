# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What of a record is read for a chunk, and whether that is what was written.

All of it, with the checksum of the index; or those blocks that have what is needed, with the record's sums, whose
checksum the index has.
"""

from __future__ import annotations

from collections.abc import Sequence

from mbridge_fsdp_ckpt.errors import DamagedCheckpointError
from mbridge_fsdp_ckpt.format.rows import Chunk
from mbridge_fsdp_ckpt.format.source import StoredChunk
from mbridge_fsdp_ckpt.format.sums import BlockHasher, RecordHasher, blocks_of, hasher_of, sums_bytes
from mbridge_fsdp_ckpt.io.checksums import Hasher, as_text, digest
from mbridge_fsdp_ckpt.io.ranges import ByteRange, OpenFiles
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.plan import records
from mbridge_fsdp_ckpt.plan.boxes import Box

RecordHashes = Hasher | RecordHasher | BlockHasher
"""What hashes that which is read of a record."""


def stored(chunk: Chunk, path: AnyPath, needed: Sequence[Box] | None) -> StoredChunk:
    """A chunk, or those of its rows that have what is needed.

    Args:
        chunk: The chunk.
        path: The file of the chunk.
        needed: The blocks that are needed of the key; None means all.
    """
    checksum = as_text(chunk.checksum)
    part = records.part_of(chunk.box, chunk.size // chunk.box.volume, needed) if needed and chunk.size else None
    if part is None:
        return StoredChunk(chunk.key, chunk.box, path, chunk.record, checksum, chunk.lead)
    blocks = ByteRange(chunk.record.offset + chunk.lead + part.begin, part.end - part.begin)
    first, length = part.begin // records.HASHED_BLOCK, sums_bytes(chunk.size)
    sums = ByteRange(chunk.record.end - length, length)
    return StoredChunk(chunk.key, part.box, path, blocks, checksum, part.skipped, sums=sums, first_block=first)


def hasher_for(chunk: StoredChunk, itemsize: int) -> RecordHashes:
    """What hashes the bytes that are read of a chunk.

    Args:
        chunk: The chunk.
        itemsize: Bytes of its elements.
    """
    if chunk.sums.length:
        return BlockHasher()
    return hasher_of(chunk.elements_at, chunk.box.volume * itemsize, chunk.record.length)


def check(chunk: StoredChunk, hasher: RecordHashes, opened: OpenFiles) -> None:
    """Compare what was read of a chunk with what was written.

    Args:
        chunk: The chunk.
        hasher: Has got the bytes.
        opened: Reads the sums, where they are not among these.

    Raises:
        DamagedCheckpointError: It is something else.
        OSError: The storage refused.
    """
    if not isinstance(hasher, BlockHasher):
        _require(chunk, chunk.checksum, hasher.result(), chunk.record)
        return
    sums, found = opened.read(chunk.path, *chunk.sums), hasher.numbers()
    _require(chunk, chunk.checksum, as_text(digest(sums)), chunk.sums)
    for number, (stored, block) in enumerate(zip(blocks_of(sums, chunk.first_block, len(found)), found, strict=True)):
        begin = chunk.record.offset + number * records.HASHED_BLOCK
        place = ByteRange(begin, min(records.HASHED_BLOCK, chunk.record.end - begin))
        _require(chunk, as_text(stored), as_text(block), place)


def _require(chunk: StoredChunk, checksum: str, found: str, place: ByteRange) -> None:
    if found != checksum:
        raise DamagedCheckpointError(
            expected=f"{checksum} of {chunk.key} {chunk.box}",
            found=f"{found} in bytes [{place.offset}, {place.end})",
            remedy="The file was changed after it was written: use another checkpoint.",
            key=str(chunk.path),
        )
