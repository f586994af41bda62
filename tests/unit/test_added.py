# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What `add_files` adds is committed as a part of the checkpoint, or refused by name: nothing is left out silently."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from mbridge_fsdp_ckpt.commit import methods, removal
from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.format.manifest import added_file
from mbridge_fsdp_ckpt.integrations.bridge.run_config import RunConfig
from mbridge_fsdp_ckpt.io.progress import Unwatched
from mbridge_fsdp_ckpt.settings import CommitMethod, Settings
from mbridge_fsdp_ckpt.tools.convert.other_files import carry_over, other_files
from mbridge_fsdp_ckpt.tools.verify import verify
from tests.unit.shards import shards
from tests.unit.test_saving import job, prepared, saved

METHODS = [method for method in get_args(CommitMethod) if method != "auto"]
NOT_UTF_8 = os.fsdecode(b"\xff")
Add = Callable[[Path], object]


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> CommitMethod:
    return request.param  # type: ignore[no-any-return]


def save(target: Path, method: CommitMethod, add: Add) -> None:
    running = job(target, Settings(dcp_metadata="always", commit=method))
    running.add_files = add  # type: ignore[assignment]
    try:
        saved(running, [prepared(shards(0, 12))])
    finally:
        assert removal.wait(60.0)


def content(root: Path) -> dict[str, bytes | str]:
    """Every entry below it."""
    found = {}
    for path in root.rglob("*"):
        kind = str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else "no file"
        found[path.relative_to(root).as_posix()] = kind
    return found


def device(path: Path) -> None:
    try:
        os.mknod(path, 0o20600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("may not make a device")


def listening(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{here}/{path.name}")  # a longer path is no address
    os.close(here)


def deep(folder: Path) -> None:
    for _ in range(300):
        folder /= "four"
        folder.mkdir()


def linked_inside(folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "a" / "x").symlink_to("/etc")


def one(folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "a" / "file").write_text("new")


def several(folder: Path) -> None:
    for name in ("a/b/c/file", "a/b/.metadata", "run.yaml", "a/b/manifest.jso"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / NOT_UTF_8).touch()
    os.link(folder / "run.yaml", folder / "hard link.yaml")
    (folder / "empty").mkdir()


REFUSED: dict[str, tuple[Add, str]] = {
    "link to a file": (lambda folder: (folder / "x").symlink_to("/etc/hostname"), "a link: x"),
    "dangling link": (lambda folder: (folder / "x").symlink_to("nowhere"), "a link: x"),
    "link to a folder": (lambda folder: (folder / "x").symlink_to("/etc"), "a link: x"),
    "link in a folder": (linked_inside, "a link: a/x"),
    "pipe": (lambda folder: os.mkfifo(folder / "x"), "a pipe: x"),
    "socket": (lambda folder: listening(folder / "x"), "a socket: x"),
    "device": (lambda folder: device(folder / "x"), "a device: x"),
    "manifest": (lambda folder: (folder / "manifest.json").touch(), "own files: manifest.json"),
    "folder": (lambda folder: (folder / "manifest.json").mkdir(), "own files: manifest.json"),
    "view": (lambda folder: (folder / ".metadata").touch(), "own files: .metadata"),
    "payload": (lambda folder: (folder / "__0_0.distcp").write_text("x"), "own files: __0_0.distcp"),
    "index": (lambda folder: (folder / "rank_00000.index").write_text("x"), "own files: rank_00000.index"),
    "backslash": (lambda folder: (folder / "a\\b").touch(), r"backslash: a\\b"),
    "deep": (deep, "too long"),
    "root": (lambda folder: (folder / "latest_checkpointed_iteration.txt").touch(), "a root of checkpoints"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_a_part_of_it_is_refused_and_the_checkpoint_before_stands(
    what: str, method: CommitMethod, tmp_path: Path
) -> None:
    add, found = REFUSED[what]
    target = tmp_path / "iter_0000010"
    save(target, method, several)
    before = content(tmp_path)
    with pytest.raises(ConfigurationError, match=f"found .*{found}.*Nothing was committed, the checkpoint before"):
        save(target, method, add)
    assert content(tmp_path) == before
    with pytest.raises(ConfigurationError):
        save(tmp_path / "iter_0000020", method, add)
    assert {name for name in content(tmp_path) if not name.startswith("iter_0000010")} <= {"iter_0000020"}


def test_files_in_folders_are_a_part_of_it(method: CommitMethod, tmp_path: Path) -> None:
    target = tmp_path / "iter_0000010"
    save(target, method, several)
    names = ["a/b/.metadata", "a/b/c/file", "a/b/manifest.jso", "run.yaml"]
    assert [(target / name).read_text() for name in names] == names
    names += ["hard link.yaml", NOT_UTF_8]
    found = {name: kind for name, kind in content(target).items() if not name.startswith("__added-")}
    assert all((name in ("a", "a/b", "a/b/c", "empty")) == (kind == "no file") for name, kind in found.items())
    listed = [entry["name"] for entry in json.loads((target / "manifest.json").read_text())["files"]]
    own = [".metadata", "__0_1.distcp"] if method == "rename" else []
    assert sorted(listed) == sorted(names + own)
    assert verify(target, header=False, workers=1, progress=Unwatched()).damage == []


@pytest.mark.parametrize("there", ["link", "linked folder", "pipe", "folder"])
def test_a_file_is_written_through_no_link_and_into_no_pipe(there: str, tmp_path: Path) -> None:
    """Where no rename replaces the directory as a whole, what lies in it is in the way."""
    target, outside = tmp_path / "iter_0000010", tmp_path / "outside"
    save(target, "marker", lambda folder: None)
    outside.mkdir()
    (outside / "file").write_text("somebody's")
    place = target / "a" / "file"
    if there == "linked folder":
        place.parent.symlink_to(outside)
    else:
        place.parent.mkdir()
    if there == "link":
        place.symlink_to(outside / "file")
    elif there == "pipe":
        os.mkfifo(place)
    elif there == "folder":
        place.mkdir()
    before = content(tmp_path)
    with pytest.raises(ConfigurationError, match="there already: a/file"):
        save(target, "marker", one)
    assert content(tmp_path) == before


def test_leftovers_behind_a_link_are_nobodys(tmp_path: Path) -> None:
    """Of a root whose iteration is a link, another job may write what it leads to."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "__0_0-0123456789ab.distcp").touch()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "iter_0000010").symlink_to(tmp_path / "elsewhere")
    assert methods.leftovers(tmp_path / "root") == []


_AS_NOBODY = """
import os, sys
from pathlib import Path
from mbridge_fsdp_ckpt.tools.convert.other_files import other_files
from mbridge_fsdp_ckpt.tools.convert.other_files import carry_over, other_files
from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.commit.target import check_replaceable
from tests.unit.test_added import save

root = Path(sys.argv[1])
save(root / "imports" / "all", "rename", lambda folder: None)
os.setgid(65534)
os.setuid(65534)
def closed(folder, mode, kind):
    (folder / "a").mkdir()
    place = folder / "a" / "x"
    place.mkdir() if kind == "folder" else place.touch()
    place.chmod(mode)

for method in ("rename", "marker"):
    for mode, kind in ((0o300, "folder"), (0o500, "folder"), (0o200, "file")):
        try:
            save(root / "iter_0000010", method, lambda folder: closed(folder, mode, kind))
        except ConfigurationError as error:
            print(error.found)
(root / "notes" / "closed").mkdir(parents=True)
(root / "notes" / "closed" / "diary").touch()
(root / "notes" / "closed").chmod(0)
for look in (check_replaceable, other_files):
    try:
        look(root / "notes")
        print("nothing there")
    except PermissionError as error:
        print("refused")
"""


def test_what_may_not_be_read_is_neither_left_out_nor_taken_for_nothing() -> None:
    """As another user, whom the modes of directories concern; root goes everywhere."""
    if os.getuid() != 0:
        pytest.skip("needs root to become somebody else")
    with tempfile.TemporaryDirectory() as open_to_all:  # pytest's own folders are closed to others
        Path(open_to_all).chmod(0o777)
        command = [sys.executable, "-c", _AS_NOBODY, open_to_all]
        done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
    assert done.returncode == 0, done.stderr
    closed = ["a folder that may not be read or changed: a/x"] * 2 + ["a file that may not be read: a/x"]
    assert done.stdout.splitlines() == [*closed, *closed, "refused", "refused"]


def test_a_failed_save_leaves_the_files_of_the_one_before_and_readers_find_their_own(
    method: CommitMethod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(text: str, *others: str) -> Add:
        return lambda folder: [(folder / name).write_text(text) for name in ("run_config.yaml", *others)]

    target = tmp_path / "iter_0000010"
    save(target, method, config("old", "train_state.pt"))
    before = content(tmp_path)

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(f"mbridge_fsdp_ckpt.commit.{method}.{FAILING[method]}", full)
        with pytest.raises(OSError, match="No space"):
            save(target, method, config("new", "vocabulary.txt"))
    assert content(tmp_path) == before
    save(target, method, config("new", "vocabulary.txt"))
    assert RunConfig.read(target).text == "new"
    assert {"run_config.yaml": b"new", "vocabulary.txt": b"new"}.items() <= content(target).items()
    assert "train_state.pt" not in content(target)
    assert not added_file(target, "train_state.pt").exists()
    into = tmp_path / "carried"
    carry_over(target, other_files(target), into, {}, lambda data: data)
    assert {"run_config.yaml", "vocabulary.txt"} <= content(into).keys()
    assert not any(name.startswith("__added") for name in content(into))
    for emptied in {added_file(target, "run_config.yaml"), target / "run_config.yaml"}:
        right = emptied.read_bytes()
        emptied.write_bytes(b"")
        damage = verify(target, header=False, workers=1, progress=Unwatched()).damage
        assert [finding.file for finding in damage] == [emptied.as_posix().removeprefix(f"{target}/")]
        emptied.write_bytes(right)


FAILING = {"rename": "write_file", "marker": "replace_file"}
