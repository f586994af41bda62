"""Ranges of files: every block that is read is a sign of life, however large the range."""

from __future__ import annotations

from pathlib import Path

import pytest

from mbridge_fsdp_ckpt.storage import ranges
from mbridge_fsdp_ckpt.storage.checksums import HASHED_AT_ONCE, Hasher, checksum
from mbridge_fsdp_ckpt.storage.ranges import OpenFiles, Scratch


@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (1, 1), (HASHED_AT_ONCE, 1), (3 * HASHED_AT_ONCE + 1, 4)])
def test_every_block_is_a_sign(length: int, blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "_READ_AT_ONCE", HASHED_AT_ONCE)
    path, data = tmp_path / "file", bytes(range(251)) * (length // 251 + 2)
    path.write_bytes(data)
    wanted = data[7 : 7 + length]
    files, signs = OpenFiles(), [0]

    def sign() -> None:
        signs[0] += 1

    scratch = Scratch(sign)
    assert files.read(path, 7, length, Hasher(), scratch).tobytes() == wanted
    assert files.read(path, 7, length, None, scratch).tobytes() == wanted
    assert files.checksum(path, 7, length, scratch) == checksum(wanted)
    assert signs == [3 * blocks]
