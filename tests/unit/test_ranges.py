# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Ranges of files: every block that is read is a heartbeat, however large the range."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mbridge_fsdp_ckpt.io import ranges
from mbridge_fsdp_ckpt.io.checksums import HASHED_AT_ONCE, Hasher, checksum
from mbridge_fsdp_ckpt.io.prefetch import Range
from mbridge_fsdp_ckpt.io.ranges import MAX_OPEN, OpenFiles, Place, Scratch


@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (1, 1), (HASHED_AT_ONCE, 1), (3 * HASHED_AT_ONCE + 1, 4)])
def test_every_block_is_a_sign(length: int, blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "_READ_AT_ONCE", HASHED_AT_ONCE)
    path, data = tmp_path / "file", bytes(range(251)) * (length // 251 + 2)
    path.write_bytes(data)
    wanted = data[7 : 7 + length]
    files, heartbeats = OpenFiles(), [0]

    def sign() -> None:
        heartbeats[0] += 1

    scratch = Scratch(sign)
    assert files.read(path, 7, length, Hasher(), scratch).tobytes() == wanted
    assert files.read(path, 7, length, None, scratch).tobytes() == wanted
    files.pass_through(path, 7, length, hasher := Hasher(), scratch)
    assert hasher.result() == checksum(wanted)
    assert heartbeats == [3 * blocks]


LARGE = 2 * HASHED_AT_ONCE + 64


@pytest.mark.parametrize(
    ("length", "start", "kept"),
    [
        *((LARGE, start, kept) for start, kept in ((0, 0), (0, 1), (3, 4), (0, 2 * HASHED_AT_ONCE))),
        *((LARGE, start, kept) for start, kept in ((64, HASHED_AT_ONCE + 1), (HASHED_AT_ONCE, HASHED_AT_ONCE))),
        *((200, start, kept) for start, kept in ((0, 0), (0, 200), (64, 100), (199, 1))),
    ],
)
@pytest.mark.parametrize("ahead", [False, True])
def test_a_part_goes_to_its_place_and_all_is_hashed(
    length: int, start: int, kept: int, ahead: bool, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    data = np.random.default_rng(5).bytes(length + 9)
    path.write_bytes(data)
    files, hasher, memory = OpenFiles(), Hasher(), np.zeros(kept, dtype=np.uint8)
    with files.reading_ahead([Range(path, 7, length)] if ahead else []):
        files.read_part(path, 7, length, Place(start, memory), hasher, Scratch())
    assert hasher.result() == checksum(data[7 : 7 + length])
    assert memory.tobytes() == data[7 + start : 7 + start + kept]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_read_keeps_its_file_while_others_are_opened(tmp_path: Path) -> None:
    """It goes on after more files than stay open were read: not from whichever of them has its descriptor by then."""
    others = [tmp_path / str(number) for number in range(2 * MAX_OPEN)]
    for number, path in enumerate(others):
        path.write_bytes(bytes([number % 251]) * 8)
    before = open_files()
    files, suspended = OpenFiles(), []
    for path in others:
        reads = files.read_each(path, 0, [4, 4], None, Scratch())
        suspended.append((next(reads).tobytes(), reads))
    for number, (first, reads) in enumerate(suspended):
        assert first + b"".join(part.tobytes() for part in reads) == bytes([number % 251]) * 8
    del suspended, reads
    assert open_files() <= before + MAX_OPEN
    del files
    assert open_files() <= before
