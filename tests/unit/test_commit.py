"""A checkpoint appears complete or not at all, and what dead saves leave is found."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from mbridge_fsdp_ckpt.storage import commit, files, rename
from mbridge_fsdp_ckpt.storage.source import TRACKER, find_checkpoint


class Death(BaseException):
    """The process ends here."""


def fill(directory: Path, content: str) -> Path:
    (directory / "sub").mkdir(parents=True, exist_ok=True)
    (directory / "file").write_text(content)
    (directory / "sub" / "file").write_text(content)
    return directory


def content(directory: Path) -> str:
    found = {path.read_text() for path in (directory / "file", directory / "sub" / "file")}
    assert len(found) == 1
    return found.pop()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "iter_0000010"


@pytest.fixture
def without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rename, "_exchange", lambda one, other: False)


def die_at_rename(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The process dies instead of its n-th rename."""
    original, count = Path.rename, 0

    def mortal_rename(self: Path, to: Path) -> Path:
        nonlocal count
        count += 1
        if count == number:
            raise Death
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
    rename.put_in_place(fill(rename.RenameCommit(target).directory, "new"), target)
    assert content(target) == "new"
    assert names(target.parent) == ["iter_0000010"]


def test_a_second_commit_replaces_the_whole_directory(target: Path) -> None:
    fill(target, "old")
    (target / "only in the old one").touch()
    rename.put_in_place(fill(rename.RenameCommit(target).directory, "new"), target)
    assert names(target) == ["file", "sub"]
    assert content(target) == "new"
    assert names(target.parent) == ["iter_0000010"]


@pytest.mark.usefixtures("without_exchange")
def test_where_nothing_can_be_exchanged_the_old_one_steps_aside(target: Path) -> None:
    fill(target, "old")
    rename.put_in_place(fill(rename.RenameCommit(target).directory, "new"), target)
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
        raise AssertionError("a rename beside the exchange")

    monkeypatch.setattr(Path, "rename", no_rename)
    rename.put_in_place(staging, target)
    assert content(target) == "new"


def test_death_after_the_exchange_leaves_the_new_checkpoint_and_a_leftover(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(target, "old")
    staging = fill(rename.RenameCommit(target).directory, "new")

    def die(path: Path) -> None:
        raise Death

    monkeypatch.setattr(shutil, "rmtree", die)
    with pytest.raises(Death):
        rename.put_in_place(staging, target)
    monkeypatch.undo()
    assert content(target) == "new"
    assert not commit.recover(target)
    assert len(commit.remove_leftovers(target.parent)) == 1
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
    assert commit.recover(target) is recovered
    assert content(target) == "old"
    assert commit.recover(target) is False
    assert commit.remove_leftovers(target.parent) == [staging]
    assert names(target.parent) == ["iter_0000010"]


@pytest.mark.usefixtures("without_exchange")
def test_death_after_both_renames_leaves_the_new_checkpoint(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(target, "old")
    staging = fill(rename.RenameCommit(target).directory, "new")
    with monkeypatch.context() as mortal:
        mortal.setattr(shutil, "rmtree", lambda path: (_ for _ in ()).throw(Death))
        with pytest.raises(Death):
            rename.put_in_place(staging, target)
    assert content(target) == "new"
    assert commit.recover(target) is False
    [aside] = rename.leftovers(target.parent)
    assert isinstance(aside, Path)
    assert content(aside) == "old"
    commit.remove_leftovers(target.parent)
    assert names(target.parent) == ["iter_0000010"]


def test_the_only_copy_is_no_leftover(tmp_path: Path) -> None:
    aside = fill(tmp_path / ".replaced-iter_0000010-0123456789ab", "old")
    assert commit.remove_leftovers(tmp_path) == []
    assert content(aside) == "old"


def test_nothing_is_recovered_where_nothing_died(tmp_path: Path) -> None:
    assert commit.recover(tmp_path / "iter_0000010") is False
    assert commit.recover(tmp_path / "no" / "such" / "iter_0000010") is False
    fill(tmp_path / "iter_0000020", "other")
    assert commit.recover(tmp_path / "iter_0000010") is False


@pytest.mark.parametrize("other", ["model-ema", "model-1", "mode", "modelx"])
def test_another_targets_old_checkpoint_is_not_taken(tmp_path: Path, other: str) -> None:
    aside = fill(tmp_path / f".replaced-{other}-0123456789ab", "another's")
    assert commit.recover(tmp_path / "model") is False
    assert content(aside) == "another's"
    assert commit.recover(tmp_path / other) is True
    assert content(tmp_path / other) == "another's"


@pytest.mark.parametrize("name", ["run[1]", "run*", "a b", "été"])
def test_any_name_is_recovered(tmp_path: Path, name: str) -> None:
    fill(tmp_path / f".replaced-{name}-0123456789ab", "old")
    assert commit.recover(tmp_path / name) is True
    assert content(tmp_path / name) == "old"


def test_another_rank_may_recover_first(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(target.parent / ".replaced-iter_0000010-0123456789ab", "old")
    original = Path.rename

    def beaten(self: Path, to: Path) -> Path:
        original(self, to)
        return original(self, to)

    monkeypatch.setattr(Path, "rename", beaten)
    assert commit.recover(target) is True
    assert content(target) == "old"


def test_leftovers_are_what_dead_saves_leave_and_nothing_else(tmp_path: Path) -> None:
    for name in ("iter_0000010", "iter_0000020", ".hidden", ".staging-iter_0000030-a", ".replaced-iter_0000010-b"):
        fill(tmp_path / name, name)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    (tmp_path / ".staging-file").write_text("a file of somebody's")
    (tmp_path / ".latest_checkpointed_iteration.txt.0123456789ab.new").write_text("30")
    assert [path.name for path in commit.leftovers(tmp_path)] == [
        ".latest_checkpointed_iteration.txt.0123456789ab.new",
        ".replaced-iter_0000010-b",
        ".staging-iter_0000030-a",
    ]
    commit.remove_leftovers(tmp_path)
    assert commit.leftovers(tmp_path) == []
    assert len(names(tmp_path)) == 5
    assert commit.leftovers(tmp_path / "no such root") == []


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
        files.sync_directory(tmp_path)
    else:
        with pytest.raises(OSError, match="refused"):
            files.sync_directory(tmp_path)


def test_what_the_tracker_names_is_moved_back_where_a_save_died_between_its_renames(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("10")
    fill(tmp_path / ".replaced-iter_0000010-0123456789ab", "old")
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000010"
    assert content(tmp_path / "iter_0000010") == "old"
