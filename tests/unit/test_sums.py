# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Large records: checksums of their parts, what a load of some rows reads, and that no byte of it may change."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from mbridge_fsdp_ckpt.errors import DamagedCheckpointError, ManifestError
from mbridge_fsdp_ckpt.format import reader
from mbridge_fsdp_ckpt.format.payload import PayloadWriter
from mbridge_fsdp_ckpt.format.reader import SafeSource
from mbridge_fsdp_ckpt.format.rows import Chunk
from mbridge_fsdp_ckpt.format.source import StoredChunk
from mbridge_fsdp_ckpt.format.sums import sums_bytes, sums_bytes_of
from mbridge_fsdp_ckpt.io.ranges import Place, Scratch
from mbridge_fsdp_ckpt.plan import records
from mbridge_fsdp_ckpt.plan.boxes import Box, whole
from mbridge_fsdp_ckpt.tools.audit import Audit
from tests.unit import handmade, index_bytes
from tests.unit.elements import expected_bytes, pattern
from tests.unit.handmade import AVERAGE, LOWER, TENSORS, UPPER

BLOCK = 8
"""Bytes of a hashed block here: the halves of the average, 2 rows of 12 bytes, have three."""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(records, "HASHED_BLOCK", BLOCK)
    monkeypatch.setattr(reader, "HASHED_AT_ONCE", 12)  # a row
    return handmade.make(tmp_path / "iter_0000010")


def lower_of(directory: Path, *boxes: Box) -> tuple[SafeSource, StoredChunk]:
    """The chunk of the lower half, or the part of it that has these boxes."""
    source = SafeSource(directory)
    found = source.chunks([AVERAGE], {AVERAGE: boxes} if boxes else None)[AVERAGE]
    [chunk] = [chunk for chunk in found if chunk.box.intersect(LOWER) is not None]
    return source, chunk


def hashes(data: bytes, lead: int, size: int, block: int) -> bytes:
    """A record's sums, as docs/format.md says, by xxhash alone."""
    elements, around = data[lead : lead + size], data[:lead] + data[lead + size :]
    parts = [around, *(elements[start : start + block] for start in range(0, size, block))]
    return b"".join(xxhash.xxh3_64_intdigest(part).to_bytes(8, "little") for part in parts)


@pytest.mark.parametrize(("size", "expected"), [(0, 0), (1, 0), (8, 0), (9, 24), (16, 24), (17, 32), (800, 808)])
def test_large_records_alone_have_sums(size: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "HASHED_BLOCK", BLOCK)
    assert sums_bytes(size) == expected
    assert sums_bytes_of(np.array([size, size], dtype=np.uint64)).tolist() == [expected] * 2


@pytest.mark.parametrize("size", [(1 << 20) + 1, 3 << 20, (3 << 20) + 12345])
@pytest.mark.parametrize("lengths", [[1 << 22], [1 << 20], [7, (1 << 20) + 1, 1 << 14]], ids=str)
def test_what_is_written_is_what_the_format_says(size: int, lengths: list[int], tmp_path: Path) -> None:
    """Blocks of a mebibyte, whatever pieces the elements come in; stock's record is whole without the sums."""
    tensor = pattern(torch.uint8, size)
    writer, data = PayloadWriter(tmp_path / "__0_0.distcp"), expected_bytes(tensor)
    before = writer.add("before", pattern(torch.uint8, 13), whole((13,)))
    chunk = writer.add_pieces("key", torch.uint8, _pieces(data, lengths), whole((size,)))
    after = writer.add("after", pattern(torch.uint8, 13), whole((13,)))
    writer.close()
    file = writer.path.read_bytes()
    assert (before.record.end, chunk.record.end, len(file)) == (
        chunk.record.offset,
        after.record.offset,
        after.record.end,
    )
    record = file[chunk.record.offset : chunk.record.end]
    count = 1 + -(-size // (1 << 20))
    torchs, sums = record[: -8 * count], record[-8 * count :]
    assert sums == hashes(torchs, chunk.lead, size, 1 << 20)
    assert (chunk.size, chunk.checksum) == (size, xxhash.xxh3_64_intdigest(sums))
    assert torchs[chunk.lead :][:size] == data
    assert torch.equal(torch.load(io.BytesIO(torchs), weights_only=True), tensor)
    for small in (before, after):
        assert small.checksum == xxhash.xxh3_64_intdigest(file[small.record.offset : small.record.end])


def _pieces(data: bytes, lengths: list[int]) -> Iterator[bytes]:
    while data:
        for length in lengths:
            yield data[:length]
            data = data[length:]


def spoiled(directory: Path, at: int) -> bytes:
    """Flip a bit of a byte of the second rank's payload; returns what the file was."""
    path = directory / handmade.payload(1)
    content = bytearray(before := path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    return before


def read_in_each_way(source: SafeSource, chunk: StoredChunk) -> torch.Tensor:
    """Its elements; every way to read it has to agree."""
    found = source.read(chunk)
    memory = np.zeros(chunk.box.volume * found.element_size(), dtype=np.uint8)
    source.read_part(chunk, Place(0, memory), Scratch())
    source.verify(chunk, Scratch())
    rows = [(box, row.clone()) for box, row in source.read_rows(chunk, Scratch())]
    assert [box for box, _ in rows] == [chunk.box.part(0, row, row + 1) for row in range(chunk.box.size[0])]
    assert torch.equal(torch.cat([row for _, row in rows]), found)
    with source.reading_ahead([chunk]):
        assert torch.equal(source.read(chunk, scratch=Scratch()), found)
    assert memory.tobytes() == expected_bytes(found)
    return found


def errors_in_each_way(source: SafeSource, chunk: StoredChunk) -> list[str]:
    """What each way to read it says is wrong."""
    size = chunk.box.volume * TENSORS[AVERAGE].element_size()
    ways: list[Any] = [
        lambda: source.read(chunk),
        lambda: source.read_part(chunk, Place(0, np.zeros(size, dtype=np.uint8)), Scratch()),
        lambda: source.verify(chunk, Scratch()),
        lambda: list(source.read_rows(chunk, Scratch())),
    ]
    found = []
    for way in ways:
        with pytest.raises(DamagedCheckpointError) as caught:
            way()
        found.append(f"{caught.value.expected}; {caught.value.found}")
    return found


def test_every_byte_of_a_record_counts_whoever_reads_it(directory: Path) -> None:
    source, chunk = lower_of(directory)
    assert torch.equal(read_in_each_way(source, chunk), TENSORS[AVERAGE][2:])
    assert not list(Audit(directory).findings())
    for at in range(chunk.record.offset, chunk.record.end):
        before = spoiled(directory, at)
        found = errors_in_each_way(*lower_of(directory))
        assert all(f"{chunk.checksum} of {AVERAGE}" in one for one in found), at
        if at % 37 == 0 or chunk.record.end - at <= 32:
            named = [one for one in Audit(directory).findings() if one.subject == "chunk"]
            assert [one.key for one in named] == [AVERAGE], at
        (directory / handmade.payload(1)).write_bytes(before)


@pytest.mark.parametrize(
    ("needed", "rows", "blocks"),
    [
        ([Box((2, 0), (1, 3))], Box((2, 0), (1, 3)), (0, 16)),
        ([Box((3, 0), (1, 3))], Box((3, 0), (1, 3)), (8, 24)),
        ([Box((3, 2), (1, 1))], Box((3, 0), (1, 3)), (8, 24)),
        ([Box((0, 0), (3, 1))], Box((2, 0), (1, 3)), (0, 16)),
    ],
)
def test_a_load_of_some_rows_reads_and_verifies_their_blocks(
    needed: list[Box], rows: Box, blocks: tuple[int, int], directory: Path
) -> None:
    _, every = lower_of(directory)
    source, chunk = lower_of(directory, *needed)
    elements = every.record.offset + every.elements_at
    assert chunk.box == rows
    assert (chunk.record.offset - elements, chunk.record.end - elements) == blocks
    assert chunk.sums.end == every.record.end
    wanted = TENSORS[AVERAGE][rows.slices_in(whole((4, 3)))]
    assert torch.equal(read_in_each_way(source, chunk), wanted)
    is_read = {*range(chunk.record.offset, chunk.record.end), *range(chunk.sums.offset, chunk.sums.end)}
    for at in range(every.record.offset, every.record.end):
        if at not in is_read and at % 11:
            continue
        before = spoiled(directory, at)
        if at in is_read:
            assert len(errors_in_each_way(source, chunk)) == 4, at
        else:
            assert torch.equal(read_in_each_way(source, chunk), wanted), at
        (directory / handmade.payload(1)).write_bytes(before)


def test_a_damaged_block_is_named(directory: Path) -> None:
    source, chunk = lower_of(directory, Box((3, 0), (1, 3)))
    begin = chunk.record.offset + BLOCK
    spoiled(directory, begin + 3)
    assert all(f"in bytes [{begin}, {begin + BLOCK})" in one for one in errors_in_each_way(source, chunk))


@pytest.mark.parametrize("needed", [[LOWER], [Box((2, 0), (1, 3)), Box((3, 0), (1, 1))], [Box((1, 1), (3, 1))]])
def test_where_all_of_it_is_needed_it_is_read_as_one(needed: list[Box], directory: Path) -> None:
    assert lower_of(directory, *needed)[1] == lower_of(directory)[1]


def test_without_verification_nothing_is_compared(directory: Path) -> None:
    source, chunk = lower_of(directory, Box((3, 0), (1, 3)))
    spoiled(directory, chunk.sums.offset)
    assert torch.equal(source.read(chunk, verify=False), TENSORS[AVERAGE][3:])


def test_a_record_too_short_for_its_sums_is_refused(directory: Path) -> None:
    part = index_bytes.decode((directory / handmade.index(1)).read_bytes())
    [row] = handmade.rows_of(part, AVERAGE)
    row["length"] = row["lead"] + 24 + 31
    (directory / handmade.index(1)).write_bytes(index_bytes.encode(part))
    with pytest.raises(ManifestError, match="inside their records, with sums"):
        list(SafeSource(directory).own_index(1).sharded_rows())


def test_a_chunk_of_no_elements_is_whole(tmp_path: Path) -> None:
    writer = PayloadWriter(tmp_path / "x")
    chunk: Chunk = writer.add("key", torch.empty(0), whole((0, 3)))
    writer.close()
    assert (chunk.size, chunk.lead) == (0, 0)
    assert UPPER.volume * 4 == 24, "as large as this module takes it to be"
