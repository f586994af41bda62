# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`verify`: each damage is found, by name, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mbridge_fsdp_ckpt.format import columns
from mbridge_fsdp_ckpt.format.manifest import read_manifest
from mbridge_fsdp_ckpt.format.reader import SafeSource
from mbridge_fsdp_ckpt.format.rows import Chunk
from mbridge_fsdp_ckpt.io import files
from mbridge_fsdp_ckpt.io.checksums import checksum
from mbridge_fsdp_ckpt.io.entries import ExtraEntry
from mbridge_fsdp_ckpt.io.files import file_checksum
from mbridge_fsdp_ckpt.tools.audit import Audit
from tests.unit import handmade
from tests.unit.handmade import AVERAGE, BIAS, GROUP, KEYS, WEIGHT, Part, edit, index, payload, write_manifest
from tests.unit.test_cli import call, data

Named = list[tuple[str, str, str | None]]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return handmade.make(tmp_path / "iter_0000010")


def flip(path: Any, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def truncate(path: Path, to: int) -> None:
    path.write_bytes(path.read_bytes()[:to])


def chunks_of(directory: Path, rank: int) -> dict[str, Chunk]:
    """A rank's chunks by key, as its own index has them."""
    found = SafeSource(directory).own_index(rank)
    rows = {found.text_of_key(place): rows for place, rows in found.sharded_rows()}
    by_key = {key: columns.chunks_of(key, some, KEYS[key]) for key, some in rows.items()}
    return {key: chunk for key, [(_, chunk)] in by_key.items()}


def named(findings: Any) -> Named:
    """Each finding's subject, file and key."""
    if isinstance(findings, dict):
        return [(f["subject"], f["file"], f["key"]) for f in findings["findings"]]
    return [(f.subject, f.file, f.key) for f in findings]


def audited(directory: Any, **options: Any) -> Named:
    return named(Audit(directory, **options).findings())


def with_extra(directory: Path, name: str, content: bytes) -> Path:
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    entry = ExtraEntry(name=name, size=len(content), checksum=checksum(content))
    write_manifest(directory / "manifest.json", read_manifest(directory).model_copy(update={"files": (entry,)}))
    return path


def test_an_intact_checkpoint_is_read_whole(directory: Path) -> None:
    sizes = sum((directory / name).stat().st_size for name in (payload(0), payload(1), GROUP))
    found = data("verify", directory)
    assert found == {
        "checkpoint": str(directory),
        "format": "fsdp_dtensor_safe",
        "intact": True,
        "checked": {"keys": 4, "indexes": 3, "chunks": 6, "files": 2, "bytes": sizes},
        "notes": [],
        "findings": [],
    }
    shown = call("verify", directory)
    assert shown.exit_code == 0
    assert shown.stdout.splitlines()[-1] == "Intact."
    assert shown.stderr == ""


def test_the_roots_tracker_is_followed(directory: Path) -> None:
    (directory.parent / "latest_checkpointed_iteration.txt").write_text("10")
    assert data("verify", directory.parent)["checkpoint"] == str(directory)


@pytest.mark.parametrize("block", [1 << 22, 7])
def test_each_flipped_byte_of_payload_is_found_in_its_chunk_and_its_file(
    directory: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(files, "_BLOCK", block)
    chunks = chunks_of(directory, 1)
    path = directory / payload(1)
    for position in range(0, path.stat().st_size, 61):
        flip(path, position)
        [hit] = [key for key, c in chunks.items() if c.record.offset <= position < c.record.end]
        assert audited(directory) == [("file", payload(1), None), ("chunk", payload(1), hit)], position
        flip(path, position)
    assert audited(directory) == []


def test_a_damaged_chunk_is_described(directory: Path) -> None:
    chunk = chunks_of(directory, 1)[WEIGHT]
    flip(directory / payload(1), chunk.record.offset)
    record = (directory / payload(1)).read_bytes()[chunk.record.offset : chunk.record.end]
    found = data("verify", directory, code=1)
    assert not found["intact"]
    assert found["findings"][1] == {
        "subject": "chunk",
        "file": payload(1),
        "key": WEIGHT,
        "box": {"offset": [2, 0], "size": [2, 3]},
        "bytes": [chunk.record.offset, chunk.record.end],
        "expected": f"xxh3_64:{chunk.checksum:016x}",
        "found": checksum(record),
    }
    shown = call("verify", directory)
    assert shown.exit_code == 1
    assert f"DAMAGED chunk {payload(1)}\n  key       {WEIGHT}\n" in shown.stdout
    assert "  block     offset [2, 0], size [2, 3]\n" in shown.stdout
    assert shown.stdout.splitlines()[-1] == "2 damaged."


@pytest.mark.parametrize("workers", [1, 8])
def test_all_damage_is_found_in_the_order_of_ranks(directory: Path, workers: int) -> None:
    for rank, key in ((0, WEIGHT), (0, AVERAGE), (1, BIAS)):
        flip(directory / payload(rank), chunks_of(directory, rank)[key].record.offset)
    assert audited(directory, workers=workers) == [
        ("file", payload(0), None),
        ("chunk", payload(0), WEIGHT),
        ("chunk", payload(0), AVERAGE),
        ("file", payload(1), None),
        ("chunk", payload(1), BIAS),
    ]


def test_bytes_between_records_are_the_files_alone(directory: Path) -> None:
    """A writer may leave gaps: only the file's own checksum covers them."""
    path, before = directory / payload(0), (directory / payload(0)).stat().st_size
    path.write_bytes(path.read_bytes() + b"gap")

    def grow(part: Part) -> None:
        part["ranks"][0].update(size=before + 3, checksum=int(file_checksum(path).rpartition(":")[2], 16))

    edit(directory, 0, grow)
    assert audited(directory) == []
    flip(path, before + 1)
    assert audited(directory) == [("file", payload(0), None)]


@pytest.mark.parametrize("header", [False, True])
def test_a_truncated_payload_file_names_the_chunks_that_are_lost(directory: Path, header: bool) -> None:
    chunk = chunks_of(directory, 1)[AVERAGE]
    truncate(directory / payload(1), chunk.record.end - 1)
    assert audited(directory, content=not header) == [
        ("file", payload(1), None),
        ("chunk", payload(1), AVERAGE),
        ("chunk", payload(1), BIAS),
    ]


def test_what_is_left_of_a_truncated_file_is_still_read(directory: Path) -> None:
    flip(directory / payload(1), chunks_of(directory, 1)[WEIGHT].record.offset)
    truncate(directory / payload(1), chunks_of(directory, 1)[BIAS].record.offset)
    assert audited(directory) == [
        ("file", payload(1), None),
        ("chunk", payload(1), BIAS),
        ("chunk", payload(1), WEIGHT),
    ]


def link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("damage", [Path.unlink, link], ids=["missing", "link"])
@pytest.mark.parametrize("content", [True, False])
def test_a_payload_file_that_is_not_there_is_lost_with_all_its_chunks(
    directory: Path, damage: Callable[[Path], None], content: bool
) -> None:
    damage(directory / payload(0))
    lost: Named = [("chunk", payload(0), key) for key in (WEIGHT, AVERAGE)]
    assert audited(directory, content=content) == [("file", payload(0), None), *lost]


def test_a_payload_file_that_cannot_be_read_is_a_finding(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = files.opened

    def broken(path: Any) -> Any:
        if path.name == payload(0):
            raise OSError(5, "Input/output error")
        return original(path)

    monkeypatch.setattr(files, "opened", broken)
    assert audited(directory) == [("file", payload(0), None)]


DAMAGES: list[Callable[[Path], Any]] = [
    lambda path: flip(path, 30),
    lambda path: flip(path, -1),
    lambda path: truncate(path, 40),
    Path.unlink,
    link,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_of_a_group_is_named_and_what_it_describes_is_said_to_be_unchecked(
    directory: Path, damage: Callable[[Path], None]
) -> None:
    damage(directory / GROUP)
    found = data("verify", directory, code=1)
    assert named(found) == [("index", GROUP, None)]
    assert found["notes"] == [f"not checked: payload, keys and tiling that damaged index files describe ({GROUP})"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_ranks_own_damaged_index_is_named_and_its_payload_is_checked_by_the_groups(
    directory: Path, damage: Callable[[Path], None]
) -> None:
    lost = [chunks_of(directory, 1)[key] for key in (WEIGHT, BIAS)]
    damage(directory / index(1))
    assert named(data("verify", directory, code=1)) == [("index", index(1), None)]
    for chunk in lost:
        flip(directory / payload(1), chunk.record.offset)
    assert audited(directory) == [
        ("index", index(1), None),
        ("file", payload(1), None),
        *(("chunk", payload(1), chunk.key) for chunk in lost),
    ]


def test_every_flipped_byte_of_an_index_is_found(directory: Path) -> None:
    for name in (GROUP, index(0)):
        for position in range(0, (directory / name).stat().st_size, 13):
            flip(directory / name, position)
            assert set(audited(directory)) == {("index", name, None)}, (name, position)
            flip(directory / name, position)
    assert audited(directory) == []


@pytest.mark.parametrize("position", [5, 300, -40])
def test_a_damaged_manifest_is_the_only_finding(directory: Path, position: int) -> None:
    flip(directory / "manifest.json", position)
    found = data("verify", directory, code=1)
    assert named(found) == [("manifest", "manifest.json", None)]
    assert found["notes"] == ["nothing else was checked: the metadata cannot be read"]


def test_a_newer_format_is_a_named_error(directory: Path) -> None:
    metadata = read_manifest(directory)
    write_manifest(directory / "manifest.json", metadata.model_copy(update={"version": (2, 0)}))
    shown = call("verify", directory)
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert shown.stderr.startswith("UnsupportedVersionError: ")


@pytest.mark.parametrize("name", ["run_config.yaml", "tokenizer/vocab.json"])
def test_a_listed_extra_file_is_checked(directory: Path, name: str) -> None:
    path = with_extra(directory, name, b"seed: 1\n")
    assert audited(directory) == []
    flip(path, 3)
    assert audited(directory) == [("file", name, None)]
    assert audited(directory, content=False) == []
    path.unlink()
    assert audited(directory, content=False) == [("file", name, None)]


def test_files_that_nobody_lists_are_nobodys_business(directory: Path) -> None:
    (directory / "notes.txt").write_text("mine")
    assert data("verify", directory)["notes"] == []
    (directory / ".metadata").write_bytes(b"")
    assert "has no checksum here" in data("verify", directory)["notes"][0]


def test_the_header_alone_does_not_read_payload(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(directory / payload(1), chunks_of(directory, 1)[BIAS].record.offset)
    read: list[str] = []
    original = files.opened

    def noted(path: Any) -> Any:
        read.append(path.name)
        return original(path)

    monkeypatch.setattr(files, "opened", noted)
    found = data("verify", directory, "--header")
    assert found["notes"] == ["payload was not read (--header)"]
    assert sorted(read) == [GROUP, "manifest.json"]


def test_total_bytes_are_those_that_are_read(directory: Path) -> None:
    with_extra(directory, "run_config.yaml", b"seed: 1\n")
    for content in (True, False):
        counts: list[int] = []
        looked = Audit(directory, content=content, progress=counts.append)
        total = looked.total_bytes()
        assert list(looked.findings()) == []
        assert sum(counts) == total == looked.checked["bytes"]
