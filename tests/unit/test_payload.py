# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The payload file: raw elements at the recorded place, in records that torch itself reads."""

import errno
import io
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import xxhash
from torch.serialization import get_crc32_options

from mbridge_fsdp_ckpt.errors import InternalError
from mbridge_fsdp_ckpt.format import payload
from mbridge_fsdp_ckpt.format.payload import PayloadWriter
from mbridge_fsdp_ckpt.format.rows import Chunk
from mbridge_fsdp_ckpt.io import direct_writer
from mbridge_fsdp_ckpt.io.checksums import Hasher, checksum
from mbridge_fsdp_ckpt.io.files import file_checksum
from mbridge_fsdp_ckpt.io.reading import ALIGNED
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.plan import records
from mbridge_fsdp_ckpt.plan.boxes import Box, Shape, whole
from tests.unit.elements import DTYPES, expected_bytes, pattern


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[PayloadWriter]:
    writer = PayloadWriter(tmp_path / "__0_0.distcp")
    yield writer
    writer.abort()


def check(path: AnyPath, chunk: Chunk, tensor: torch.Tensor) -> None:
    """The chunk's bytes and its record, read without the package."""
    data = path.read_bytes()
    start, length = chunk.record
    begin, volume = start + chunk.lead, chunk.box.volume * tensor.element_size()
    raw = data[begin : begin + volume]
    assert raw == expected_bytes(tensor)
    assert chunk.checksum == xxhash.xxh3_64_intdigest(data[start : start + length])
    assert chunk.lead >= 0
    assert begin + volume <= start + length
    loaded = torch.load(io.BytesIO(data[start : start + length]), weights_only=True)
    assert (loaded.dtype, tuple(loaded.shape)) == (tensor.dtype, chunk.box.size)
    assert loaded.untyped_storage().nbytes() == volume
    assert expected_bytes(loaded) == raw


@pytest.mark.parametrize("shape", [(), (1,), (7,), (4, 3), (2, 3, 5), (64, 129)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_lie_where_the_chunk_says(writer: PayloadWriter, dtype: torch.dtype, shape: Shape) -> None:
    tensor = pattern(dtype, whole(shape).volume).reshape(shape)
    before = pattern(torch.uint8, 13)
    writer.add("before", before, whole((13,)))
    chunk = writer.add("key", tensor.reshape(-1), whole(shape))
    after = writer.add("after", before, whole((13,)))
    writer.close()
    assert (chunk.key, chunk.box) == ("key", whole(shape))
    check(writer.path, chunk, tensor)
    check(writer.path, after, before)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.tensor(3.5), id="0-d"),
        pytest.param(torch.arange(12.0).reshape(3, 4).t(), id="transposed"),
        pytest.param(torch.arange(24)[::3], id="strided"),
        pytest.param(torch.arange(100, dtype=torch.bfloat16)[13:21], id="slice of a larger storage"),
        pytest.param(torch.arange(100, dtype=torch.uint8)[1:4], id="slice at an odd address"),
        pytest.param(torch.ones(3, requires_grad=True), id="requires grad"),
        pytest.param(torch.nn.Parameter(torch.ones(3)), id="a parameter"),
        pytest.param(torch.full((1,), 2.0).expand(5), id="expanded"),
    ],
)
def test_only_the_elements_are_written_however_they_lie_in_memory(writer: PayloadWriter, tensor: torch.Tensor) -> None:
    chunk = writer.add("key", tensor, whole(tuple(tensor.shape)))
    writer.close()
    check(writer.path, chunk, tensor.detach())


def test_a_chunk_is_shaped_like_its_box(writer: PayloadWriter) -> None:
    chunk = writer.add("key", torch.arange(6), Box((4, 3), (2, 3)))
    writer.close()
    check(writer.path, chunk, torch.arange(6).reshape(2, 3))
    assert chunk.box == Box((4, 3), (2, 3))


def _in_pieces(data: bytes, lengths: list[int]) -> Iterator[bytearray]:
    """The bytes, some at a time, in memory that is used again, as pieces of a device are."""
    memory = bytearray(max(lengths))
    for length in itertools.cycle(lengths):
        piece, data = data[:length], data[length:]
        memory[: len(piece)] = piece
        yield memory if len(piece) == len(memory) else bytearray(piece)
        if not data:
            return


@pytest.mark.parametrize("lengths", [[1], [1 << 20], [7, 0, 64], [240], [241], [239, 2]], ids=str)
def test_a_large_block_is_cut_into_records(
    writer: PayloadWriter, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 120 bytes, at most two in a record; pieces end wherever they do."""
    monkeypatch.setattr(records, "LARGEST_RECORD", 250)
    tensor = pattern(torch.float32, 150).reshape(5, 30)
    pieces = _in_pieces(expected_bytes(tensor), lengths)
    chunks = writer.add_block("key", torch.float32, pieces, Box((10, 0), (5, 30)))
    after = writer.add("after", pattern(torch.uint8, 13), whole((13,)))
    writer.close()
    assert [(chunk.box.offset, chunk.box.size) for chunk in chunks] == [
        ((10, 0), (1, 30)),
        ((11, 0), (2, 30)),
        ((13, 0), (2, 30)),
    ]
    for chunk in chunks:
        begin, end = chunk.box.offset[0] - 10, chunk.box.end[0] - 10
        check(writer.path, chunk, tensor[begin:end])
    assert chunks[1].record.offset == chunks[0].record.end
    check(writer.path, after, pattern(torch.uint8, 13))


@pytest.mark.parametrize("length", [0, 1, 239, 240, 599, 601, 900])
def test_a_large_block_of_another_length_is_a_named_error(
    writer: PayloadWriter, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "LARGEST_RECORD", 250)
    with pytest.raises(InternalError, match="bytes of elements"):
        writer.add_block("key", torch.float32, [bytes(length)], whole((5, 30)))


def test_records_follow_one_another_and_fill_the_file(writer: PayloadWriter) -> None:
    chunks = [writer.add(f"key{n}", torch.arange(n + 1), whole((n + 1,))) for n in range(5)]
    entry = writer.close()
    assert [c.record.offset for c in chunks[1:]] == [c.record.end for c in chunks[:-1]]
    assert entry.size == chunks[-1].record.end == writer.path.stat().st_size == writer.position


def test_the_file_entry_describes_the_file(writer: PayloadWriter) -> None:
    writer.add("key", torch.arange(1000), whole((1000,)))
    writer.append(b"plain bytes")
    entry = writer.close()
    data = writer.path.read_bytes()
    assert data.endswith(b"plain bytes")
    assert (entry.name, entry.size) == ("__0_0.distcp", len(data))
    assert entry.checksum == file_checksum(writer.path) == f"xxh3_64:{xxhash.xxh3_64_hexdigest(data)}"


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        PayloadWriter(path)
    assert path.read_bytes() == b"precious"


def test_torch_goes_on_writing_checksums_for_others(writer: PayloadWriter) -> None:
    before = get_crc32_options()
    writer.add("key", torch.arange(3), whole((3,)))
    assert get_crc32_options() is before is True


@pytest.mark.parametrize("blocks", [[], [b""], [b"abc"], [b"a", b"", b"bc"]])
def test_a_running_checksum_is_that_of_all_bytes(blocks: list[bytes]) -> None:
    hasher = Hasher()
    for block in blocks:
        hasher.update(block)
    assert hasher.result() == checksum(b"".join(blocks)) == f"xxh3_64:{xxhash.xxh3_64_hexdigest(b''.join(blocks))}"


def test_the_checksum_of_nothing_is_the_published_one() -> None:
    assert checksum(b"") == "xxh3_64:2d06800538d394c2"


def test_a_disk_that_refuses_is_an_os_error_at_every_write(tmp_path: Path) -> None:
    """Blocks of a page, so that every few chunks one is written."""
    writes = 0
    with patch.object(direct_writer, "BLOCK", ALIGNED):
        while _error_at(writes, tmp_path / f"{writes}.distcp") is not None:
            writes += 1
    assert writes > 5


def _error_at(write: int, path: Path) -> OSError | None:
    """What a disk that refuses this write, from 0, does to chunks; None where there were fewer writes."""
    calls, pwrite = itertools.count(), os.pwrite

    def refusing(*arguments: Any) -> int:
        if next(calls) == write:
            raise OSError(errno.ENOSPC, "full")
        return pwrite(*arguments)

    tensor, writer = torch.arange(500.0), PayloadWriter(path)
    try:
        with patch.object(os, "pwrite", refusing):
            for number in range(10):
                writer.add(f"weight {number}", tensor, whole(tensor.shape))
            writer.close()
    except OSError as error:
        return error
    finally:
        writer.abort()
    return None


@pytest.mark.parametrize("shape", [(), (1,), (7,), (4, 3), (0,), (0, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_second_record_of_a_form_is_what_torch_writes(
    writer: PayloadWriter, dtype: torch.dtype, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything around the elements is taken from the first record of the dtype and shape."""
    tensors = [pattern(dtype, whole(shape).volume).reshape(shape) for _ in range(3)]
    tensors[1] = tensors[1].flip(0) if shape and dtype.itemsize > 1 else tensors[1]
    calls: list[torch.Tensor] = []
    original = torch.save

    def counted(tensor: torch.Tensor, *arguments: Any) -> None:
        calls.append(tensor)
        original(tensor, *arguments)

    payload._frame.cache_clear()
    monkeypatch.setattr(torch, "save", counted)
    writer.add("another shape", pattern(dtype, 2), whole((2,)))
    chunks = [writer.add(f"key{n}", tensor.reshape(-1), whole(shape)) for n, tensor in enumerate(tensors)]
    writer.close()
    assert len(calls) == 2
    data = writer.path.read_bytes()
    for tensor, chunk in zip(tensors, chunks, strict=True):
        start, length = chunk.record
        expected = io.BytesIO()
        with payload.without_crc32():
            original(tensor, expected)
        assert data[start : start + length] == expected.getvalue()
        assert checksum(data[start : start + length]) == f"xxh3_64:{chunk.checksum:016x}"
        elements = expected_bytes(tensor)
        assert data[start + chunk.lead :][: len(elements)] == elements
