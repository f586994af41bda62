# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Old checkpoints: the newest stay, and none goes while somebody reads it."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from upath import UPath

from mbridge_fsdp_ckpt.commit import lease, methods, removal, rename, retention
from mbridge_fsdp_ckpt.commit.retention import (
    Iteration,
    being_read,
    iterations,
    prunable,
    prune,
    prune_later,
    reading,
    remove_later,
    remove_unless_kept,
)
from mbridge_fsdp_ckpt.errors import NotACheckpointError
from mbridge_fsdp_ckpt.io import file_system
from mbridge_fsdp_ckpt.io.object_store import ObjectStore
from mbridge_fsdp_ckpt.opening import open_checkpoint
from mbridge_fsdp_ckpt.settings import CommitMethod, Settings
from mbridge_fsdp_ckpt.tools.prune import plan_pruning
from tests.unit import handmade
from tests.unit.shards import shards
from tests.unit.test_saving import prepared, save


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Iterations 10 to 50, of which 30 never got metadata and 40 is stock's."""
    for number in (10, 20, 30, 40, 50):
        directory = tmp_path / f"iter_{number:07d}"
        directory.mkdir()
        (directory / "__0_0.distcp").write_bytes(b"x" * number)
    for number in (10, 20, 50):
        (tmp_path / f"iter_{number:07d}" / "manifest.json").write_bytes(handmade.without_tensors())
    (tmp_path / "iter_0000040" / ".metadata").write_bytes(handmade.stock_without_tensors())
    for name in ("tensorboard", "iter_", "iter_x", ".staging-iter_0000060-0123456789ab"):
        (tmp_path / name).mkdir()
    (tmp_path / "iter_0000070").write_text("a file")
    return tmp_path


def test_only_what_can_be_read_counts_among_the_newest(root: Path) -> None:
    """Else the last good checkpoint would go.  What cannot be read stays until enough that can is newer."""
    newest = handmade.make(root / "iter_0000060")
    assert numbers(prunable(root, 2)) == [10, 20, 40]
    for damage in DAMAGE:
        damage(newest)
        assert retention.older(iterations(root), 1) == retention.older(iterations(root)[:-1], 1), damage
        assert not remove_unless_kept(root / "iter_0000050", keep=1)
        shutil.rmtree(newest)
        handmade.make(newest)
    (newest / "manifest.json").unlink()
    (newest / ".metadata").write_bytes(of_stock_with("__0_0.distcp", 10**9))
    assert numbers(prune(root, 1)) == [10, 20, 40]
    assert left(root) == [30, 50, 60]
    handmade.make(root / "iter_0000080")
    assert numbers(prune(root, 1)) == [50, 60]


def emptied(file: Path) -> None:
    file.write_bytes(b"")


DAMAGE: list[Callable[[Path], object]] = [
    lambda place: emptied(place / "manifest.json"),
    lambda place: (place / handmade.payload(1)).unlink(),
    lambda place: emptied(place / handmade.payload(0)),
    lambda place: (place / handmade.GROUP).unlink(),
    lambda place: emptied(place / handmade.GROUP),
    lambda place: (place / handmade.index(1)).unlink(),
    lambda place: emptied(place / handmade.index(0)),
    lambda place: handmade.replace_group(place, b"x" * 100),
]


def of_stock_with(file: str, size: int) -> bytes:
    """Stock's metadata that names a file."""
    found = pickle.loads(handmade.stock_without_tensors())
    found.storage_data[MetadataIndex("model.weight")] = _StorageInfo(file, 0, size)
    return pickle.dumps(found)


def test_what_the_storage_does_not_tell_is_no_damage(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(directory: Path) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(retention, "defect", refused)
    with pytest.raises(OSError, match="Input/output"):
        prune(root, 1)
    assert left(root) == [10, 20, 30, 40, 50]


def numbers(found: list[Iteration]) -> list[int]:
    return [iteration.number for iteration in found]


def left(root: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.glob("iter_00000?0") if path.is_dir())


def test_iterations_are_found_oldest_first(root: Path) -> None:
    found = iterations(root)
    assert [(i.number, i.complete) for i in found] == [(10, True), (20, True), (30, False), (40, True), (50, True)]


@pytest.mark.parametrize(
    ("keep", "also_keep", "expected"),
    [
        (1, None, [10, 20, 40]),
        (2, None, [10, 20]),
        (4, None, []),
        (99, None, []),
        (1, 20, [10, 40]),
        (1, 50, [10, 20, 40]),
        (1, 30, [10, 20, 40]),
    ],
)
def test_the_newest_stay(root: Path, keep: int, also_keep: int | None, expected: list[int]) -> None:
    assert numbers(prunable(root, keep, also_keep)) == expected
    assert left(root) == [10, 20, 30, 40, 50], "asking removes nothing"
    assert numbers(prune(root, keep, also_keep)) == expected
    assert left(root) == [n for n in (10, 20, 30, 40, 50) if n not in expected]


@pytest.mark.parametrize("name", ["iter_90", "iter_00000090", "iter_\u0660\u0660\u0660\u0660\u0660\u0669\u0660"])
def test_an_iteration_is_called_as_a_run_looks_for_it(name: str, root: Path) -> None:
    """Somebody's copy is neither the newest nor an old one."""
    shutil.copytree(root / "iter_0000050", root / name)
    shutil.copytree(root / "iter_0000050", root / name.replace("9", "0").replace("\u0669", "\u0660"))
    assert numbers(prune(root, 1)) == [10, 20, 40]
    assert (root / name).is_dir()


def test_what_becomes_the_newest_while_others_go_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody deletes newer ones while a slow storage deletes old ones."""
    original = methods.remove

    def remove(*arguments: Any) -> bool:
        gone = original(*arguments)
        shutil.rmtree(root / "iter_0000050", ignore_errors=True)
        return gone

    monkeypatch.setattr(methods, "remove", remove)
    plan = plan_pruning(root, 2)
    assert numbers(prune(root, 2)) == [10]
    assert plan.carry_out() == {}
    assert left(root) == [20, 30, 40]


def test_a_root_is_looked_at_once_for_all_that_may_go(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, original = list[Path](), retention.look

    def look(root: Path) -> retention.Look:
        looks.append(root)
        return original(root)

    monkeypatch.setattr(retention, "look", look)
    assert numbers(prunable(root, 1)) == [10, 20, 40]
    assert looks == [root]


def test_a_link_that_leads_elsewhere_by_now_takes_no_pruning_with_it(root: Path, tmp_path_factory: Any) -> None:
    other, link = tmp_path_factory.mktemp("other"), tmp_path_factory.mktemp("links") / "latest"
    shutil.copytree(root, other, dirs_exist_ok=True)
    slow = threading.Event()
    removal.later("a slow deletion", lambda: slow.wait(60.0))
    link.symlink_to(root)
    prune_later(link, 2)
    remove_later(link / "iter_0000040")
    link.unlink()
    link.symlink_to(other)
    slow.set()
    assert removal.wait(30.0)
    assert [left(root), left(other)] == [[30, 50], [10, 20, 30, 40, 50]]


@pytest.mark.parametrize("moment", ["has_readable_metadata", "keeps"])
def test_what_another_pruning_takes_first_fails_nobody(
    moment: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = getattr(retention, moment)

    def answer(directory: Path, *arguments: Any, **more: Any) -> Any:
        found = asked(directory, *arguments, **more)
        if directory.name == "iter_0000010" and (root / "now").exists():
            shutil.rmtree(directory, ignore_errors=True)
        return found

    monkeypatch.setattr(retention, moment, answer)
    (root / "now").touch()
    assert remove_unless_kept(root / "iter_0000010")
    assert not (root / "iter_0000010").exists()


def test_a_lease_that_cannot_be_removed_keeps_no_checkpoint(root: Path) -> None:
    """One that is a directory, or another user's."""
    mark = root / ".reading-iter_0000020-0123456789ab"
    mark.mkdir()
    past = time.time() - lease.STALE_S - 5
    os.utime(mark, (past, past))
    assert numbers(prune(root, 1)) == [10, 20, 40]


def test_what_somebody_reads_stays_until_it_is_read(root: Path) -> None:
    with reading(root / "iter_0000010"), reading(root / "iter_0000010"), reading(root / "iter_0000040"):
        assert being_read(root / "iter_0000010")
        assert not being_read(root / "iter_0000020")
        assert numbers(prune(root, 1)) == [20]
    assert not being_read(root / "iter_0000010")
    assert list(root.glob(".reading-*")) == []
    assert numbers(prune(root, 1)) == [10, 40]


def test_a_reader_that_died_protects_for_an_hour(root: Path) -> None:
    mark = root / ".reading-iter_0000010-0123456789ab"
    mark.touch()
    assert numbers(prune(root, 2)) == [20]
    past = time.time() - lease.STALE_S - 5
    os.utime(mark, (past, past))
    assert not being_read(root / "iter_0000010")
    assert numbers(prune(root, 2)) == [10]
    assert not mark.exists()


def test_a_reader_gives_heartbeats(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with reading(root / "iter_0000010") as alive:
        [mark] = root.glob(".reading-*")
        past = time.time() - lease.STALE_S - 5
        os.utime(mark, (past, past))
        alive()
        assert not being_read(root / "iter_0000010"), "not more often than needed"
        monkeypatch.setattr(lease, "STALE_S", 0.0)
        alive()
        monkeypatch.undo()
        assert being_read(root / "iter_0000010")


def test_a_reader_that_may_not_write_reads_without_protection(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path, *arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", refused)
    with reading(root / "iter_0000010") as alive:
        alive()
        assert not being_read(root / "iter_0000010")


def test_what_lies_aside_is_read_under_a_lease_all_the_same(root: Path) -> None:
    """A removal looks a second time then, and moves it back for its reader."""
    (root / "iter_0000010").rename(root / ".replaced-iter_0000010-0123456789ab")
    with reading(root / "iter_0000010"):
        assert being_read(root / "iter_0000010")


def test_nothing_is_marked_where_there_is_nothing(root: Path) -> None:
    with reading(root / "iter_0000099"), reading(root / "iter_0000010", enabled=False):
        assert list(root.glob(".reading-*")) == []


def test_one_that_cannot_be_removed_keeps_no_other_and_fails_nobody(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the background: an open file on NFS is no reason to end a training run."""
    original = Path.rename

    def rename(self: Path, to: Path) -> Path:
        assert threading.current_thread() is not threading.main_thread()
        if self.name == "iter_0000010":
            raise OSError(16, "Device or resource busy")
        return original(self, to)

    monkeypatch.setattr(Path, "rename", rename)
    with caplog.at_level(logging.INFO):
        prune_later(root, 2)
        assert removal.wait(30.0)
    assert left(root) == [10, 30, 40, 50]
    assert "iter_0000010 could not be removed: [Errno 16]" in caplog.text
    assert f"removed {root / 'iter_0000020'}" in caplog.text


def test_a_pruning_that_waited_looks_at_what_is_there_now(root: Path) -> None:
    """Behind a slow deletion, while a run went back to iteration 10 and saved 20 anew."""
    (root / "latest_checkpointed_iteration.txt").write_text("50")
    slow = threading.Event()
    removal.later("a slow deletion", lambda: slow.wait(60.0))
    prune_later(root, 1)
    (root / "latest_checkpointed_iteration.txt").write_text("20")
    slow.set()
    assert removal.wait(30.0)
    assert left(root) == [20, 30, 50]


def test_what_a_save_puts_in_its_place_meanwhile_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the last look and the removal a save commits; trackers follow later."""
    asked, looks = retention.keeps, itertools.count()

    def keeps(directory: Path, *arguments: Any, **more: Any) -> str:
        said = asked(directory, *arguments, **more)
        if directory.name == "iter_0000020" and next(looks) == 1:  # the look before it goes
            directory.rename(root / "before")
            shutil.copytree(root / "before", directory)
        return said

    monkeypatch.setattr(retention, "keeps", keeps)
    assert numbers(prune(root, 1)) == [10, 40]
    assert left(root) == [20, 30, 50]
    assert not list(root.glob(".deleted-*"))


MEANWHILE = ["a reader", "a tracker that names it", "a tracker that is illegible", "newer ones go"]


@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_what_speaks_for_it_after_the_last_look_brings_it_back(
    meanwhile: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, looks, tracker = retention.keeps, itertools.count(), root / "latest_checkpointed_iteration.txt"
    synced = synced_directories(monkeypatch)

    def keeps(directory: Path, *arguments: Any, **more: Any) -> str:
        said = asked(directory, *arguments, **more)
        if directory.name == "iter_0000020" and next(looks) == 1:  # that before it is put aside
            assert not said
            synced.clear()
            if meanwhile == "a reader":
                (root / ".reading-iter_0000020-0123456789ab").touch()
            elif meanwhile == "a tracker that names it":
                tracker.write_text("20")
            elif meanwhile == "newer ones go":
                for number in (40, 50):
                    shutil.rmtree(root / f"iter_{number:07d}")
            else:
                tracker.symlink_to("gone")
        return said

    monkeypatch.setattr(retention, "keeps", keeps)
    if meanwhile == "a tracker that is illegible":
        with pytest.raises(NotACheckpointError):
            prune(root, 1)
        assert synced == [root], "moved back for good"
    else:
        assert numbers(prune(root, 1)) == ([10] if meanwhile == "newer ones go" else [10, 40])
    assert (root / "iter_0000020" / "manifest.json").is_file()
    assert not [path for mark in (".deleted-*", ".replaced-*") for path in root.glob(mark)]


def synced_directories(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Those that `rename` flushes to disk from now on."""
    found, original = list[Path](), file_system.sync_directory

    def sync(directory: Path) -> None:
        found.append(directory)
        original(directory)

    monkeypatch.setattr(rename, "sync_directory", sync)
    return found


def test_what_a_save_has_put_in_its_place_and_published_leaves_no_old_one_beside_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it lies aside: it may not go, and cannot go back."""
    asked, looks = retention.keeps, itertools.count()

    def keeps(directory: Path, *arguments: Any, **more: Any) -> str:
        if directory.name == "iter_0000020" and next(looks) == 2:  # the look while it lies aside
            assert not directory.exists()
            directory.mkdir()
            (directory / "manifest.json").write_bytes(handmade.without_tensors())
            (root / "latest_checkpointed_iteration.txt").write_text("20")
        return asked(directory, *arguments, **more)

    monkeypatch.setattr(retention, "keeps", keeps)
    assert numbers(prune(root, 1)) == [10, 20, 40]
    assert [path.name for path in (root / "iter_0000020").iterdir()] == ["manifest.json"]
    assert not [path for mark in (".deleted-*", ".replaced-*") for path in root.glob(mark)]


def test_what_a_tracker_names_through_a_link_stays(root: Path) -> None:
    (root / "release").symlink_to("iter_0000010")
    (root / "latest_checkpointed_iteration.txt").write_text("release")
    assert numbers(prune(root, 1)) == [20, 40]


@pytest.mark.parametrize("link", ["best", "iter_0000090", "latest/assets"])
def test_what_a_link_in_the_root_leads_to_stays(
    root: Path, link: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Under an iteration's name it even is the newest that stays; the root may be reached by a link, too."""
    (by_link := tmp_path_factory.mktemp("links") / "run").symlink_to(root)
    (root / "iter_0000010" / "assets").mkdir()
    leads, _, inside = link.partition("/")
    (root / leads).symlink_to(Path("iter_0000010") / inside)
    assert numbers(prunable(root, 2)) == numbers(prune(by_link, 2)) == ([20, 40] if leads == "iter_0000090" else [20])
    assert (root / leads).exists()


def test_a_lease_counts_for_the_checkpoint_of_its_exact_name(root: Path) -> None:
    for name in ("iter_0000010-copy-0123456789ab", "iter_0000020-notes"):
        (root / f".reading-{name}").touch()
    assert numbers(prune(root, 1)) == [10, 20, 40]


@pytest.mark.parametrize("method", ["rename", "marker"])
def test_what_a_save_has_committed_and_not_published_yet_stays(root: Path, method: CommitMethod) -> None:
    """A run that went back saves 20 anew; the pruning after its save before runs meanwhile."""
    found: list[int] = []
    (root / "latest_checkpointed_iteration.txt").write_text("50")
    past = time.time() - 60.0
    for path in root.rglob("*"):
        os.utime(path, (past, past))
    save_anew = partial(save, ranks=[prepared(shards(0, 12))], settings=Settings(commit=method))
    save_anew(root / "iter_0000020", after_commit=lambda: found.extend(numbers(prune(root, 1))))
    assert removal.wait(30.0)
    assert found == [10, 40], "iteration 20 is older than 50, and no tracker names it"
    assert open_checkpoint(root / "iter_0000020").metadata.keys
    assert not list(root.glob(".reading-*"))


@pytest.mark.parametrize("age", [0.0, lease.STALE_S + 5])
def test_what_a_save_by_marker_writes_into_on_a_file_system_stays(root: Path, age: float) -> None:
    """A removal takes the directory as a whole; the save renews its time."""
    (root / "iter_0000010" / "__0_0-0123456789ab.distcp").write_bytes(b"x")
    then = time.time() - age
    os.utime(root / "iter_0000010", (then, then))
    assert numbers(prune(root, 1)) == ([10, 20, 40] if age else [20, 40])


RULES: list[Callable[[Path], object]] = [
    lambda root: prune(root, 1),
    lambda root: plan_pruning(root, 1).carry_out(),
    lambda root: prune_later(root, 1),
    lambda root: remove_unless_kept(root / "iter_0000010"),
]


@pytest.mark.parametrize("remove", RULES, ids=["prune", "the tool", "after a save", "one"])
def test_all_that_removes_a_checkpoint_asks_one_function(
    root: Path, remove: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "keeps", lambda directory, *arguments, **more: "a new rule")
    remove(root)
    assert removal.wait(30.0)
    assert left(root) == [10, 20, 30, 40, 50]


def test_nothing_else_removes_a_checkpoint() -> None:
    """`methods.remove` deletes what is committed, and what commits by marker or rename does is its part."""
    package = Path(retention.__file__).parents[1]
    calls = [f"{file.relative_to(package)}:{line.strip()}" for file in package.rglob("*.py") for line in file.open()]
    calls = [call for call in calls if re.search(r"\b(methods|marker|rename)\.remove\(", call)]
    assert sorted(calls) == [
        "commit/methods.py:return marker.remove(directory, may_go)",
        "commit/methods.py:return rename.remove(local, may_go)",
        "commit/retention.py:return methods.remove(directory, may_go)",
    ]


def test_objects_of_a_save_that_goes_on_in_a_removed_iteration_stay(tmp_path: Path) -> None:
    """Without a rename a save writes where the checkpoint is that it will replace."""
    root = UPath(f"memory://{uuid.uuid4().hex}")
    for number in (1, 2):
        for path in handmade.make(tmp_path / f"iter_{number:07d}").iterdir():
            (root / f"iter_{number:07d}" / path.name).write_bytes(path.read_bytes())
    new = ["__0_0-0123456789ab.distcp", "rank_00000-0123456789ab.index", "run_config.yaml"]
    for name in new:
        (root / "iter_0000001" / name).write_bytes(b"x")
    assert prune(root, 1) == []
    assert methods.remove(root / "iter_0000001"), "as where that save begins after the last look"
    assert sorted(path.name for path in (root / "iter_0000001").iterdir()) == new


def test_metadata_of_a_save_that_commits_while_a_stock_checkpoint_is_removed_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After stock's metadata is gone; the names of its other files are the same in each save, too."""
    place = UPath(f"memory://{uuid.uuid4().hex}") / "iter_0000001"
    for name in (".metadata", "__0_0.distcp", "train_state.pt"):
        (place / name).write_bytes(b"x")
    new = [".metadata", "__0_0-0123456789ab.distcp", "manifest.json", "train_state.pt"]
    original, removed = ObjectStore.remove, list[str]()

    def remove(store: ObjectStore) -> None:
        original(store)
        removed.append(store.path.name)
        if removed == [".metadata", "manifest.json"]:  # what makes it one is gone
            for name in new:
                (place / name).write_bytes(b"of another save")

    monkeypatch.setattr(ObjectStore, "remove", remove)
    assert methods.remove(place)
    assert sorted(path.name for path in place.iterdir()) == new
    assert all(path.read_bytes() == b"of another save" for path in place.iterdir())


def test_in_an_object_store_metadata_goes_first_and_what_tells_whose_the_rest_is_goes_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing at all where it may not go by then; a removal that dies leaves what counts as a dead save's."""
    place, removed = UPath(f"memory://{uuid.uuid4().hex}") / "iter_0000001", list[str]()
    for name in (".metadata", "__0_0.distcp", "notes.txt", "train_state.pt"):
        (place / name).write_bytes(b"x")
    original = ObjectStore.remove

    def remove(store: ObjectStore) -> None:
        removed.append(store.path.name)
        original(store)

    monkeypatch.setattr(ObjectStore, "remove", remove)
    assert not methods.remove(place, lambda _: False)
    assert removed == []
    assert methods.remove(place)
    assert removed == [".metadata", "manifest.json", "notes.txt", "train_state.pt", "__0_0.distcp"]


def test_of_a_removed_checkpoint_whose_metadata_is_damaged_nothing_is_left() -> None:
    """Which files were its own nobody can tell; that no save goes on there was asked."""
    place = UPath(f"memory://{uuid.uuid4().hex}") / "iter_0000001"
    for name in ("manifest.json", "__0_0-0123456789ab.distcp", "rank_00000-0123456789ab.index", "run_config.yaml"):
        (place / name).write_bytes(b"x")
    assert methods.remove(place)
    assert not place.exists()


def test_objects_of_a_save_that_goes_on_in_a_removed_stock_checkpoint_stay() -> None:
    root = UPath(f"memory://{uuid.uuid4().hex}")
    for number in (1, 2):
        for name in (".metadata", "__0_0.distcp", "train_state.pt"):
            (root / f"iter_{number:07d}" / name).write_bytes(b"x")
    new = ["__0_0-0123456789ab.distcp", "rank_00000-0123456789ab.index"]
    for name in new:
        (root / "iter_0000001" / name).write_bytes(b"x")
    assert prune(root, 1) == []
    assert methods.remove(root / "iter_0000001"), "as where that save begins after the last look"
    assert sorted(path.name for path in (root / "iter_0000001").iterdir()) == [*new, "train_state.pt"]


def test_nothing_is_removed_where_a_tracker_is_illegible(root: Path) -> None:
    (root / "latest_checkpointed_iteration.txt").symlink_to("gone")
    with pytest.raises(NotACheckpointError):
        prune(root, 1)
    assert left(root) == [10, 20, 30, 40, 50]


def test_a_root_that_cannot_be_read_fails_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        prune_later(tmp_path / "gone", 2)
        assert removal.wait(30.0)
    assert "left to a later save" in caplog.text


def test_no_half_of_a_removed_checkpoint_can_be_taken_for_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", dies)
    with pytest.raises(KeyboardInterrupt):
        prune(root, 3)
    monkeypatch.undo()
    assert left(root) == [20, 30, 40, 50]
    assert [path.name for path in root.glob(".deleted-iter_0000010-*")] != []
