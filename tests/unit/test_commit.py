# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A checkpoint appears complete or not at all, and what dead saves leave is found."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from mbridge_fsdp_ckpt.commit import lease, methods, removal, rename
from mbridge_fsdp_ckpt.errors import ConfigurationError, StorageError
from mbridge_fsdp_ckpt.format.names import MANIFEST_NAME, TRACKER
from mbridge_fsdp_ckpt.integrations.common.root import find_checkpoint
from mbridge_fsdp_ckpt.io import file_system, files
from mbridge_fsdp_ckpt.tools.convert.destination import check_free


class Death(BaseException):
    """The process ends here."""


def fill(directory: Path, content: str) -> Path:
    (directory / "sub").mkdir(parents=True, exist_ok=True)
    for name in (MANIFEST_NAME, "sub/file"):
        (directory / name).write_text(content)
    return directory


def content(directory: Path) -> str:
    found = {(directory / name).read_text() for name in (MANIFEST_NAME, "sub/file")}
    assert len(found) == 1
    return found.pop()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def put_in_place(staging: Path, target: Path) -> None:
    """With what follows once nobody waits."""
    for path in rename.put_in_place(staging, target):
        removal.delete(path)


def remove_leftovers(target: Path) -> list[str]:
    """What a save of the target takes away first; the targets it belonged to."""
    found = [path for path in methods.condemn_leftovers(target) if removal.delete(path)]
    return sorted(path.name.rpartition("-")[0] for path in found)


def age(path: Path) -> Path:
    """Nobody has touched it for longer than a lease lasts."""
    os.utime(path, (time.time() - lease.STALE_S - 5,) * 2)
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "iter_0000010"


@pytest.fixture
def without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rename, "_exchange", lambda one, other: False)


def die_at_rename(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException | None = None) -> None:
    """The process dies instead of its n-th rename, or the rename fails."""
    original, count = Path.rename, 0

    def mortal_rename(self: Path, to: Path) -> Path:
        nonlocal count
        count += 1
        if count == number:
            raise error or Death
        return original(self, to)

    monkeypatch.setattr(Path, "rename", mortal_rename)


def test_staging_lies_beside_the_target_under_a_name_no_reader_takes_for_a_checkpoint(tmp_path: Path) -> None:
    target = tmp_path / "not" / "there" / "iter_0000010"
    one, other = rename.RenameCommit(target).directory, rename.RenameCommit(target).directory
    assert one != other
    assert one.parent == target.parent
    assert one.is_dir()
    assert one.name.startswith(".staging-iter_0000010-")
    assert list(target.parent.glob("iter_*")) == []
    assert not target.exists()


def test_a_first_commit_renames(target: Path) -> None:
    put_in_place(fill(rename.RenameCommit(target).directory, "new"), target)
    assert content(target) == "new"
    assert names(target.parent) == ["iter_0000010"]


def test_a_second_commit_replaces_the_whole_directory(target: Path) -> None:
    fill(target, "old")
    (target / "only in the old one").touch()
    put_in_place(fill(rename.RenameCommit(target).directory, "new"), target)
    assert names(target) == [MANIFEST_NAME, "sub"]
    assert content(target) == "new"
    assert names(target.parent) == ["iter_0000010"]


@pytest.mark.usefixtures("without_exchange")
def test_where_nothing_can_be_exchanged_the_old_one_steps_aside(target: Path) -> None:
    fill(target, "old")
    put_in_place(fill(rename.RenameCommit(target).directory, "new"), target)
    assert content(target) == "new"
    assert names(target.parent) == ["iter_0000010"]


def test_an_exchange_leaves_no_moment_without_a_checkpoint(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(target, "old")
    staging = fill(rename.RenameCommit(target).directory, "new")
    if not rename._exchange(staging, target):
        pytest.skip("this file system cannot exchange")
    assert (content(target), content(staging)) == ("new", "old")
    assert rename._exchange(staging, target)

    def no_rename(self: Path, to: Path) -> Path:
        assert content(target) == "new", "a rename before the exchange"
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "rename", no_rename)
    assert rename.put_in_place(staging, target) == [staging], "under its name, where no other can be given"
    assert (content(target), content(staging)) == ("new", "old")


def test_death_after_the_exchange_leaves_the_new_checkpoint_and_a_leftover(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(target, "old")
    staging = fill(rename.RenameCommit(target).directory, "new")

    def die(path: Path, to: Path) -> None:
        raise Death

    monkeypatch.setattr(Path, "rename", die)
    with pytest.raises(Death):
        rename.put_in_place(staging, target)
    monkeypatch.undo()
    assert content(target) == "new"
    assert not methods.recover(target)
    assert remove_leftovers(target) == [".deleted-iter_0000010"]
    assert names(target.parent) == ["iter_0000010"]


@pytest.mark.usefixtures("without_exchange")
@pytest.mark.parametrize(("death_at", "recovered"), [(1, False), (2, True)])
def test_the_old_checkpoint_survives_death_at_either_rename(
    target: Path, monkeypatch: pytest.MonkeyPatch, death_at: int, recovered: bool
) -> None:
    fill(target, "old")
    staging = fill(rename.RenameCommit(target).directory, "new")
    with monkeypatch.context() as mortal:
        die_at_rename(mortal, death_at)
        with pytest.raises(Death):
            rename.put_in_place(staging, target)
    assert target.exists() is not recovered
    assert methods.recover(target) is recovered
    assert content(target) == "old"
    assert methods.recover(target) is False
    assert remove_leftovers(target) == [".deleted-iter_0000010"]
    assert names(target.parent) == ["iter_0000010"]


@pytest.mark.usefixtures("without_exchange")
@pytest.mark.parametrize("at", [1, 2])
def test_a_reader_that_moves_the_old_one_back_between_two_renames_fails_no_save(
    target: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """A reader asks for the target just after a rename of the save: nothing tells it from one that has died."""
    fill(target, "old")
    staging = fill(rename.RenameCommit(target).directory, "new")
    original, renames = Path.rename, 0

    def watched(self: Path, to: Path) -> Path:
        nonlocal renames
        renamed, renames = original(self, to), renames + 1
        if renames == at:
            methods.recover(target)
        return renamed

    monkeypatch.setattr(Path, "rename", watched)
    put_in_place(staging, target)
    assert content(target) == "new"
    assert names(target.parent) == ["iter_0000010"]


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_a_pruning_that_takes_the_target_away_for_a_moment_fails_no_save(
    target: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool, before: bool
) -> None:
    """The target goes, or comes back, between a look at it and the rename that follows."""
    fill(target, "old")
    aside = target.parent / ".replaced-iter_0000010-0123456789ab"
    if not before:
        target.rename(aside)
    staging = fill(rename.RenameCommit(target).directory, "new")
    if not exchanges:
        monkeypatch.setattr(rename, "_exchange", lambda one, other: False)
    asked, looks = Path.exists, 0

    def exists(self: Path, **options: Any) -> bool:
        nonlocal looks
        found = asked(self, **options)
        if self == target and (looks := looks + 1) == 1:
            (target if before else aside).rename(aside if before else target)
        return found

    monkeypatch.setattr(Path, "exists", exists)
    put_in_place(staging, target)
    assert content(target) == "new"
    assert names(target.parent) == [*([aside.name] if before else []), "iter_0000010"]


@pytest.mark.parametrize("goes", [True, False])
def test_a_removal_takes_and_puts_back_what_it_was_asked_for_not_an_older_leftover(target: Path, goes: bool) -> None:
    """A save died after both of its renames, and what it replaced lies aside with the younger time."""
    age(fill(target, "new"))
    fill(target.parent / ".replaced-iter_0000010-0123456789ab", "old")
    with contextlib.suppress(FileNotFoundError):
        assert rename.remove(target, lambda aside: content(aside) == "new" and goes) is goes
    assert goes or content(target) == "new"


@pytest.mark.usefixtures("without_exchange")
def test_death_after_both_renames_leaves_the_new_checkpoint(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(target, "old")
    staging = fill(rename.RenameCommit(target).directory, "new")
    with monkeypatch.context() as mortal:
        die_at_rename(mortal, 3)
        with pytest.raises(Death):
            rename.put_in_place(staging, target)
    assert content(target) == "new"
    assert methods.recover(target) is False
    [aside] = rename.leftovers(target.parent)
    assert isinstance(aside, Path)
    assert content(aside) == "old"
    assert remove_leftovers(target) == [".deleted-iter_0000010"]
    assert names(target.parent) == ["iter_0000010"]


@pytest.mark.parametrize("made", [False, True])
def test_the_only_copy_is_no_leftover(target: Path, made: bool) -> None:
    """Nor where somebody has made the directory: what makes a checkpoint is its metadata."""
    aside = age(fill(target.parent / ".replaced-iter_0000010-0123456789ab", "old"))
    if made:
        target.mkdir()
    assert remove_leftovers(target) == []
    assert remove_leftovers(target.parent / "iter_0000020") == []
    assert content(aside) == "old"
    assert methods.recover(target) is True
    assert content(target) == "old"
    assert names(target.parent) == ["iter_0000010"]


def test_something_without_a_head_hides_no_checkpoint_and_is_not_deleted_by_a_load(target: Path) -> None:
    aside = fill(target.parent / ".replaced-iter_0000010-0123456789ab", "old")
    target.mkdir()
    (target / "notes.txt").write_text("somebody's")
    assert methods.recover(target) is False
    assert (target / "notes.txt").read_text() == "somebody's"
    assert remove_leftovers(target) == []
    assert content(aside) == "old"


@pytest.mark.usefixtures("without_exchange")
def test_what_has_no_head_never_takes_the_place_of_the_old_checkpoint(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save over it dies between its renames: the old checkpoint is still the one that is moved back."""
    fill(target.parent / ".replaced-iter_0000010-0123456789ab", "old")
    target.mkdir()
    (target / "notes.txt").write_text("somebody's")
    staging = fill(rename.RenameCommit(target).directory, "new")
    with monkeypatch.context() as mortal:
        die_at_rename(mortal, 2)
        with pytest.raises(Death):
            rename.put_in_place(staging, target)
    assert methods.recover(target) is True
    assert content(target) == "old"


def test_a_conversion_does_not_take_the_place_of_what_was_put_aside(target: Path) -> None:
    fill(target.parent / ".replaced-iter_0000010-0123456789ab", "old")
    with pytest.raises(ConfigurationError, match="put aside"):
        check_free(target, target.parent / "elsewhere")


def test_a_file_in_the_targets_place_is_refused_before_anything_is_written(target: Path) -> None:
    target.write_text("somebody's")
    with pytest.raises(NotADirectoryError, match="iter_0000010"):
        methods.begin(target)
    assert names(target.parent) == ["iter_0000010"]


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("overwrites", [True, False])
def test_a_commit_that_cannot_be_flushed_is_undone(
    target: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool, overwrites: bool
) -> None:
    if overwrites:
        fill(target, "old")
    staging = fill(rename.RenameCommit(target).directory, "new")
    if not exchanges:
        monkeypatch.setattr(rename, "_exchange", lambda one, other: False)
    original = file_system.sync_directory

    def sync(directory: Path) -> None:
        if directory == target.parent:
            raise OSError(5, "Input/output error")
        original(directory)

    monkeypatch.setattr(rename, "sync_directory", sync)
    with pytest.raises(OSError, match="Input/output error"):
        rename.put_in_place(staging, target)
    assert content(staging) == "new"
    if overwrites:
        assert content(target) == "old"
    assert len(names(target.parent)) == 1 + overwrites


def test_a_commit_that_can_neither_be_flushed_nor_undone_says_so(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = fill(rename.RenameCommit(target).directory, "new")

    def sync(directory: Path) -> None:
        if directory == target.parent:
            die_at_rename(monkeypatch, 1, OSError(30, "Read-only file system"))
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(rename, "sync_directory", sync)
    with pytest.raises(StorageError, match=r"Input/output error; then .*Read-only.*older or the newer"):
        rename.put_in_place(staging, target)
    assert content(target) == "new"


def test_nothing_is_recovered_where_nothing_died(tmp_path: Path) -> None:
    assert methods.recover(tmp_path / "iter_0000010") is False
    assert methods.recover(tmp_path / "no" / "such" / "iter_0000010") is False
    fill(tmp_path / "iter_0000020", "other")
    assert methods.recover(tmp_path / "iter_0000010") is False


@pytest.mark.parametrize("other", ["model-ema", "model-1", "mode", "modelx"])
def test_another_targets_old_checkpoint_is_not_taken(tmp_path: Path, other: str) -> None:
    aside = fill(tmp_path / f".replaced-{other}-0123456789ab", "another's")
    assert methods.recover(tmp_path / "model") is False
    assert content(aside) == "another's"
    assert methods.recover(tmp_path / other) is True
    assert content(tmp_path / other) == "another's"


@pytest.mark.parametrize("name", ["run[1]", "run*", "a b", "été"])
def test_any_name_is_recovered(tmp_path: Path, name: str) -> None:
    fill(tmp_path / f".replaced-{name}-0123456789ab", "old")
    assert methods.recover(tmp_path / name) is True
    assert content(tmp_path / name) == "old"


def test_another_rank_may_recover_first(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(target.parent / ".replaced-iter_0000010-0123456789ab", "old")
    original = Path.rename

    def beaten(self: Path, to: Path) -> Path:
        original(self, to)
        return original(self, to)

    monkeypatch.setattr(Path, "rename", beaten)
    assert methods.recover(target) is True
    assert content(target) == "old"


def test_leftovers_are_what_dead_saves_leave_and_nothing_else(tmp_path: Path) -> None:
    dead = (".replaced-iter_0000010-0123456789ab", ".staging-iter_0000030-0123456789ab")
    for name in ("iter_0000010", "iter_0000020", ".hidden", *dead):
        fill(tmp_path / name, name)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    (tmp_path / ".staging-file").write_text("a file of somebody's")
    (tmp_path / ".latest_checkpointed_iteration.txt.0123456789ab.new").write_text("30")
    assert [path.name for path in methods.leftovers(tmp_path)] == [
        ".latest_checkpointed_iteration.txt.0123456789ab.new",
        *dead,
    ]
    assert methods.leftovers(tmp_path / "no such root") == []


def test_a_save_takes_away_its_own_leftovers_and_others_only_when_nobody_renews_them(target: Path) -> None:
    root = target.parent
    for mark in (".staging", ".deleted"):
        for name in ("iter_0000010", "iter_0000020", "iter_0000030", "a-iter_0000010"):
            fill(root / f"{mark}-{name}-0123456789ab", "dead")
    tracker = root / ".latest_checkpointed_iteration.txt.0123456789ab.new"
    tracker.touch()
    fill(target, "whole")
    for number in (20, 30):
        age(root / f".staging-iter_00000{number}-0123456789ab")
    lease.renew(root / ".staging-iter_0000020-0123456789ab")
    assert remove_leftovers(target) == [".deleted-iter_0000010", ".deleted-iter_0000010", ".deleted-iter_0000030"]
    assert names(root) == [
        ".deleted-a-iter_0000010-0123456789ab",
        ".deleted-iter_0000020-0123456789ab",
        ".deleted-iter_0000030-0123456789ab",
        tracker.name,
        ".staging-a-iter_0000010-0123456789ab",
        ".staging-iter_0000020-0123456789ab",
        "iter_0000010",
    ]
    for path in root.glob(".*"):
        age(path)
    assert len(remove_leftovers(target)) == 6
    assert names(root) == ["iter_0000010"]
    assert content(target) == "whole"


def test_of_two_saves_of_one_target_the_later_one_wins(target: Path) -> None:
    """The first loses its staging directory, and fails; it does not take the second one's."""
    first = rename.RenameCommit(target)
    fill(first.directory, "first")
    assert remove_leftovers(target) == [".deleted-iter_0000010"]
    second = rename.RenameCommit(target)
    put_in_place(fill(second.directory, "second"), target)
    with pytest.raises(FileNotFoundError):
        rename.put_in_place(first.directory, target)
    first.abort()
    assert content(target) == "second"
    assert names(target.parent) == ["iter_0000010"]


_AS_NOBODY = """
import os, sys
from pathlib import Path
from mbridge_fsdp_ckpt.commit import methods
from mbridge_fsdp_ckpt.tools.repair import plan_repair
target = Path(sys.argv[1])
os.setgid(65534)
os.setuid(65534)
try:
    list((target.parent / "lost+found").iterdir())
except PermissionError:
    for method in ("rename", "marker"):
        methods.recover(target)
        methods.condemn_leftovers(target, method)
        methods.begin(target, method)
    print(len(methods.leftovers(target.parent)))
    (target.parent / ".replaced-lost+found-0123456789ab").rename(target.parent / "moved")
    try:
        plan_repair(target.parent, force=False)
    except PermissionError as error:
        print(error.filename)
"""


def test_a_sibling_that_one_may_not_look_into_is_no_failure() -> None:
    """As another user, whom the modes of directories concern; root goes everywhere.

    Of a repair it is one: the trackers would name an older iteration.
    """
    if os.getuid() != 0:
        pytest.skip("needs root to become somebody else")
    with tempfile.TemporaryDirectory() as open_to_all:  # pytest's own folders are closed to others
        root = Path(open_to_all)
        root.chmod(0o777)
        for name in ("lost+found", ".replaced-lost+found-0123456789ab", "iter_0000020"):
            fill(root / name, "somebody else's").chmod(0o700)
        command = [sys.executable, "-c", _AS_NOBODY, str(root / "iter_0000010")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        hidden = root / "iter_0000020" / "manifest.json"
        assert (done.returncode, done.stdout) == (0, f"1\n{hidden}\n"), done.stderr


def test_a_small_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "latest_checkpointed_iteration.txt"
    files.replace_file(path, b"10")
    files.replace_file(path, b"20")
    assert path.read_bytes() == b"20"
    assert names(tmp_path) == [path.name]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_the_old_content_stays_where_replacing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "latest_checkpointed_iteration.txt"
    path.write_bytes(b"10")

    def no_space(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        owner: Any = os if failing == "fsync" else Path
        full.setattr(owner, failing, no_space)
        with pytest.raises(OSError, match="No space"):
            files.replace_file(path, b"20")
    assert path.read_bytes() == b"10"
    assert names(tmp_path) == [path.name]


@pytest.mark.parametrize(("error", "harmless"), [(22, True), (5, False)])
def test_only_a_file_system_without_directory_syncs_may_fail_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, harmless: bool
) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(error, "refused")

    monkeypatch.setattr(os, "fsync", fsync)
    if harmless:
        file_system.sync_directory(tmp_path)
    else:
        with pytest.raises(OSError, match="refused"):
            file_system.sync_directory(tmp_path)


def test_what_the_tracker_names_is_moved_back_where_a_save_died_between_its_renames(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("10")
    fill(tmp_path / ".replaced-iter_0000010-0123456789ab", "old")
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000010"
    assert content(tmp_path / "iter_0000010") == "old"
