# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""File systems and object stores answer alike through one protocol, and differ where they must."""

from __future__ import annotations

import uuid
from contextlib import closing
from pathlib import Path

import pytest
from upath import UPath

from mbridge_fsdp_ckpt.errors import ConfigurationError, DamagedCheckpointError
from mbridge_fsdp_ckpt.io.checksums import HASHED_AT_ONCE, Hasher, checksum
from mbridge_fsdp_ckpt.io.files import (
    entries,
    everything_in,
    hold,
    is_plain_file,
    read_bounded,
    replace_file,
    write_file,
)
from mbridge_fsdp_ckpt.io.held_path import HeldPath
from mbridge_fsdp_ckpt.io.ranges import OpenFiles, Scratch
from mbridge_fsdp_ckpt.io.store import AnyPath, as_path, called, is_local, store_of

DATA = bytes(range(251)) * (3 * HASHED_AT_ONCE // 251)


@pytest.fixture(params=["file system", "object store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> AnyPath:
    if request.param == "file system":
        return tmp_path
    root = UPath(f"memory://{uuid.uuid4().hex}")
    root.mkdir()
    return root


def test_what_is_written_is_read(place: AnyPath) -> None:
    path = place / "x"
    write_file(path, DATA)
    assert is_plain_file(path)
    assert read_bounded(path, len(DATA)) == DATA
    with store_of(path).opened() as file:
        assert file.readline(7) == DATA[:7]


def test_a_file_grows_block_by_block(place: AnyPath) -> None:
    with closing(store_of(place / "x").create()) as file:
        for block in (b"a", memoryview(b"bc"), b""):
            file.write(block)
        file.finish()
    assert (place / "x").read_bytes() == b"abc"


def test_a_file_is_replaced_and_nothing_is_left_beside_it(place: AnyPath) -> None:
    for data in (b"one", b"other"):
        replace_file(place / "x", data)
        assert (place / "x").read_bytes() == data
    assert [path.name for path in place.iterdir()] == ["x"]


@pytest.mark.parametrize("hashed", [True, False])
@pytest.mark.parametrize(("offset", "length"), [(0, 0), (0, len(DATA)), (5, 1), (7, 2 * HASHED_AT_ONCE + 1)])
def test_a_range_is_that_part_of_the_file(place: AnyPath, offset: int, length: int, hashed: bool) -> None:
    path, wanted, hasher = place / "x", DATA[offset : offset + length], Hasher() if hashed else None
    write_file(path, DATA)
    files = OpenFiles()
    for scratch in (None, Scratch()):
        assert files.read(path, offset, length, hasher, scratch).tobytes() == wanted
    assert hasher is None or hasher.result() == checksum(wanted * 2)
    files.pass_through(path, offset, length, passed := Hasher(), Scratch())
    assert passed.result() == checksum(wanted)


@pytest.mark.parametrize(("offset", "found"), [(len(DATA) - 3, 3), (len(DATA), 0), (0, len(DATA))])
def test_a_range_that_ends_too_early_says_where(place: AnyPath, offset: int, found: int) -> None:
    write_file(place / "x", DATA)
    length = found + 4
    with pytest.raises(DamagedCheckpointError, match=f"{length} bytes from byte {offset}; found {found} bytes"):
        OpenFiles().read(place / "x", offset, length, Hasher())
    with pytest.raises(DamagedCheckpointError, match=f"found {found} bytes"):
        OpenFiles().pass_through(place / "x", offset, length, Hasher(), Scratch())


def test_a_range_of_a_file_that_is_gone_says_so(place: AnyPath) -> None:
    with pytest.raises(DamagedCheckpointError, match="replaced or removed while it was read"):
        OpenFiles().read(place / "x", 0, 1)


def test_a_file_system_refuses_what_is_there_and_what_leads_elsewhere(tmp_path: Path) -> None:
    path, link = tmp_path / "x", tmp_path / "link"
    write_file(path, b"one")
    link.symlink_to(path)
    with pytest.raises(FileExistsError):
        write_file(path, b"other")
    assert path.read_bytes() == b"one"
    assert store_of(link).is_link()
    assert not is_plain_file(link)
    with pytest.raises(OSError, match="symbolic links"), store_of(link).opened():
        pass
    with pytest.raises(OSError, match="symbolic links"):
        store_of(link).ranged()


def test_sizes_are_those_of_files_by_their_names(place: AnyPath) -> None:
    (place / "folder").mkdir()
    for name, data in (("x", b"12"), ("folder/y", b"")):
        write_file(place / name, data)
    if isinstance(place, Path):
        (place / "link").symlink_to("x")
        (place / "linked").symlink_to("folder")
        assert {path.name for path in everything_in(place)} == {"folder", "link", "linked", "x", "y"}
        assert sum(path.name == "y" for path in everything_in(place)) == 1, "behind no link"
    assert store_of(place).sizes() == {"x": 2, "folder/y": 0}
    assert store_of(as_path(str(place))).sizes() == {"x": 2, "folder/y": 0}


def test_what_may_not_be_listed_is_not_empty(place: AnyPath, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: AnyPath) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(place), "iterdir", refused)
    with pytest.raises(PermissionError):
        entries(place)


def test_only_a_file_system_can_hold_on_to_a_directory(tmp_path: Path) -> None:
    held = hold(tmp_path)
    assert held == tmp_path
    assert isinstance(held, HeldPath)
    assert isinstance(held / "x", HeldPath)
    assert hold(held) is held
    for other in (tmp_path / "absent", as_path("memory://there")):
        assert hold(other) is other


@pytest.mark.parametrize(
    ("text", "local"), [("x", True), ("/x", True), ("file:///x", True), ("memory://x", False), ("memory:///x/y", False)]
)
def test_what_a_user_gives_is_local_or_not(text: str, local: bool) -> None:
    path = as_path(text)
    assert is_local(path) is local
    assert store_of(path).local == (path if local else None)
    assert as_path(path) == path
    assert not local or path.is_absolute()


@pytest.mark.parametrize("place", ["", "  ", "file://"])
def test_an_empty_path_is_refused(place: str) -> None:
    for name in (as_path, called):
        with pytest.raises(ConfigurationError, match="an empty path"):
            name(place)
