# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`prune`: what goes, what stays whatever it is asked, and that it asks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from upath import UPath

from mbridge_fsdp_ckpt.commit.retention import reading
from mbridge_fsdp_ckpt.tools.command import console as frame
from mbridge_fsdp_ckpt.tools.command import prune as command
from tests import trackers
from tests.unit import handmade
from tests.unit.handmade import payload
from tests.unit.test_cli import call, data, run

NUMBERS = (10, 20, 30, 40)
HEADS = {"manifest.json": handmade.without_tensors(), ".metadata": handmade.stock_without_tensors()}


def iteration(root: Any, number: int, metadata: str = "manifest.json", size: int = 1000) -> Any:
    directory = root / f"iter_{number:07d}"
    directory.mkdir(parents=True)
    content = HEADS[metadata] if metadata else b""
    (directory / "__0_0.distcp").write_bytes(bytes(size - len(content)))
    if metadata:
        (directory / metadata).write_bytes(content)
    return directory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number in NUMBERS:
        iteration(tmp_path, number)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("40")
    return tmp_path


def left(root: Any) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.glob("iter_*"))


def test_the_newest_stay(root: Path) -> None:
    found = data("prune", root, "--keep", 2, "--yes")
    assert found == {
        "root": str(root),
        "dry_run": False,
        "prunable": {"iter_0000010": 1000, "iter_0000020": 1000},
        "removed": ["iter_0000010", "iter_0000020"],
        "freed_bytes": 2000,
        "kept": {"iter_0000030": "among the newest 2", "iter_0000040": "the tracker names it"},
    }
    assert left(root) == [30, 40]
    assert sorted(path.name for path in root.iterdir()) == [
        "iter_0000030",
        "iter_0000040",
        "latest_checkpointed_iteration.txt",
    ]


def test_shown_it_says_what_goes_what_stays_and_what_is_freed(root: Path) -> None:
    shown = call("prune", root, "--keep", 3, "-y")
    assert shown.exit_code == 0
    assert shown.stdout.splitlines() == [
        str(root),
        "  remove  iter_0000010  1.0 kB",
        "  keep    iter_0000020  among the newest 3",
        "  keep    iter_0000030  among the newest 3",
        "  keep    iter_0000040  the tracker names it",
        "Freed 1.0 kB.",
    ]


def test_a_dry_run_removes_nothing(root: Path) -> None:
    shown = call("prune", root, "--keep", 1, "--dry-run")
    assert shown.exit_code == 0
    assert shown.stdout.splitlines()[-1] == "Would free 3.0 kB."
    assert data("prune", root, "--keep", 1, "--dry-run")["removed"] == []
    assert left(root) == [10, 20, 30, 40]


@pytest.mark.parametrize("keep", [4, 5, 100])
def test_where_nothing_is_to_go_nobody_is_asked(root: Path, keep: int) -> None:
    shown = call("prune", root, "--keep", keep)
    assert shown.exit_code == 0
    assert "Nothing to remove." in shown.stdout
    assert left(root) == [10, 20, 30, 40]


def test_what_the_tracker_names_stays_whatever_its_age(root: Path) -> None:
    (root / "latest_checkpointed_iteration.txt").write_text("10\n")
    assert data("prune", root, "--keep", 1, "--yes")["removed"] == ["iter_0000020", "iter_0000030"]
    assert left(root) == [10, 40]


def test_what_bridges_tracker_alone_names_stays(root: Path) -> None:
    (root / "latest_checkpointed_iteration.txt").unlink()
    (root / "latest_train_state.pt").write_bytes(trackers.state(10))
    found = data("prune", root, "--keep", 1, "--yes")
    assert (found["kept"]["iter_0000010"], left(root)) == ("latest_train_state.pt names it", [10, 40])


def test_what_either_of_two_trackers_names_stays(root: Path) -> None:
    """Which of them is meant nobody can tell."""
    (root / "latest_checkpointed_iteration.txt").write_text("20")
    (root / "latest_train_state.pt").write_bytes(trackers.state(10))
    assert data("prune", root, "--keep", 1, "--yes")["removed"] == ["iter_0000030"]
    assert left(root) == [10, 20, 40]


def test_what_a_tracker_names_by_a_link_stays(root: Path) -> None:
    elsewhere = root / "latest"
    elsewhere.write_text("10")
    (root / "latest_checkpointed_iteration.txt").unlink()
    (root / "latest_checkpointed_iteration.txt").symlink_to(elsewhere)
    assert data("prune", root, "--keep", 1, "--yes")["removed"] == ["iter_0000020", "iter_0000030"]
    elsewhere.unlink()
    assert call("prune", root, "--keep", 1, "--yes").exit_code == 1


def test_what_is_read_through_a_link_stays(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    link = tmp_path_factory.mktemp("links") / "best"
    link.symlink_to(root / "iter_0000010")
    with reading(link):
        assert data("prune", root, "--keep", 1, "--yes")["kept"]["iter_0000010"] == "being read"
    assert [left(root), list(link.parent.iterdir()), list(root.glob(".reading-*"))] == [[10, 40], [link], []]


def test_incomplete_directories_stay_and_don_t_count(root: Path) -> None:
    iteration(root, 5, metadata="")
    iteration(root, 50, metadata="")
    found = data("prune", root, "--keep", 1, "--yes")
    assert found["kept"]["iter_0000050"] == "incomplete: no metadata, or being written"
    assert left(root) == [5, 40, 50]


def test_what_cannot_be_read_stays_and_does_not_count(root: Path) -> None:
    """Nor does it keep what is old from going, once enough can be read."""
    (handmade.make(root / "iter_0000050") / payload(1)).unlink()
    found = data("prune", root, "--keep", 1, "--yes")
    assert found["kept"]["iter_0000050"] == f"not counted, since it cannot be read: no file {payload(1)}"
    assert left(root) == [40, 50]
    (root / "latest_checkpointed_iteration.txt").unlink()
    iteration(root, 60)
    assert data("prune", root, "--keep", 1, "--yes")["removed"] == ["iter_0000040", "iter_0000050"]


def test_stock_checkpoints_count(root: Path) -> None:
    iteration(root, 50, metadata=".metadata")
    assert data("prune", root, "--keep", 1, "--yes")["removed"] == ["iter_0000010", "iter_0000020", "iter_0000030"]
    assert left(root) == [40, 50]


def test_what_is_being_read_stays(root: Path) -> None:
    with reading(root / "iter_0000010"):
        found = data("prune", root, "--keep", 1, "--yes")
    assert found["kept"]["iter_0000010"] == "being read"
    assert left(root) == [10, 40]


def test_a_reader_that_died_keeps_nothing(root: Path) -> None:
    mark = root / ".reading-iter_0000010-0123456789ab"
    mark.touch()
    os.utime(mark, (time.time() - 4000,) * 2)
    assert data("prune", root, "--keep", 3, "--yes")["removed"] == ["iter_0000010"]


def test_a_root_without_tracker_may_be_pruned(root: Path) -> None:
    (root / "latest_checkpointed_iteration.txt").unlink()
    assert data("prune", root, "--keep", 1, "--yes")["removed"] == ["iter_0000010", "iter_0000020", "iter_0000030"]


@pytest.mark.parametrize("content", ["", "ten", "\u0661\u0660", "-1", "10 20"])
def test_an_illegible_tracker_stops_everything(root: Path, content: str) -> None:
    (root / "latest_checkpointed_iteration.txt").write_text(content)
    shown = call("prune", root, "--keep", 1, "--yes")
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert shown.stderr.startswith("NotACheckpointError: ")
    assert "mbridge_fsdp_ckpt repair" in shown.stderr
    assert left(root) == [10, 20, 30, 40]


def test_without_a_terminal_and_without_yes_it_refuses(root: Path) -> None:
    shown = call("prune", root, "--keep", 1)
    assert shown.exit_code == 2
    assert "Add --yes" in " ".join(shown.stderr.replace("│", " ").split())
    assert left(root) == [10, 20, 30, 40]


def test_in_a_pipe_it_refuses(root: Path) -> None:
    found = run("prune", str(root), "--keep", "1")
    assert found.returncode == 2
    assert "Add --yes" in " ".join(found.stderr.replace("│", " ").split())
    assert "\x1b" not in found.stdout + found.stderr
    assert left(root) == [10, 20, 30, 40]


@pytest.mark.parametrize(("answer", "code", "stay"), [("y\n", 0, [40]), ("n\n", 1, [10, 20, 30, 40]), ("\n", 1, None)])
def test_on_a_terminal_it_asks(
    root: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, stay: list[int] | None
) -> None:
    monkeypatch.setattr(frame, "is_interactive", lambda: True)
    shown = call("prune", root, "--keep", 1, answer=answer)
    assert shown.exit_code == code
    assert "Remove 3 checkpoints (3.0 kB)?" in shown.output
    assert left(root) == (stay or [10, 20, 30, 40])


def test_what_came_to_be_read_while_it_asked_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def confirm(question: str, *, yes: bool) -> None:
        (root / ".reading-iter_0000020-0123456789ab").touch()
        iteration(root, 50)
        (root / "latest_checkpointed_iteration.txt").write_text("30")

    monkeypatch.setattr(command, "confirm", confirm)
    assert data("prune", root, "--keep", 1, "--yes")["removed"] == ["iter_0000010"]
    assert left(root) == [20, 30, 40, 50]


def test_what_was_shown_goes_and_nothing_that_has_its_name_since(
    root: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to the root leads to another run when the question is answered."""
    other, link = tmp_path_factory.mktemp("other"), tmp_path_factory.mktemp("links") / "latest"
    for number in NUMBERS:
        iteration(other, number)
    link.symlink_to(root)

    def confirm(question: str, *, yes: bool) -> None:
        link.unlink()
        link.symlink_to(other)

    monkeypatch.setattr(command, "confirm", confirm)
    assert data("prune", link, "--keep", 1, "--yes")["removed"] == []
    assert [left(root), left(other)] == [[10, 20, 30, 40], [10, 20, 30, 40]]


def test_what_was_shown_goes_and_nothing_that_was_saved_in_its_place_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a store that tells no times, of the same size."""
    root = UPath("memory://shown")
    for number in NUMBERS:
        iteration(root, number)

    def confirm(question: str, *, yes: bool) -> None:
        (root / "iter_0000010" / "manifest.json").write_bytes(HEADS["manifest.json"])

    monkeypatch.setattr(command, "confirm", confirm)
    assert data("prune", str(root), "--keep", 1, "--yes")["removed"] == ["iter_0000020", "iter_0000030"]


@pytest.mark.parametrize("spelled", ["{}/", "{}/.", "{}/iter_0000040/..", "{}//", "file://{}"])
def test_a_root_may_be_spelled_in_other_ways(spelled: str, root: Path) -> None:
    place = spelled.format(root)
    with reading(root / "iter_0000010"):
        assert data("prune", place, "--keep", 1, "--yes")["removed"] == ["iter_0000020", "iter_0000030"]
    assert left(root) == [10, 40]


def test_one_that_cannot_be_removed_keeps_no_other_and_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Path.rename

    def rename(self: Path, to: Path) -> Path:
        if self.name == "iter_0000010":
            raise OSError(16, "Device or resource busy", str(self))
        return original(self, to)

    monkeypatch.setattr(Path, "rename", rename)
    shown = call("prune", root, "--keep", 1, "--yes")
    assert (shown.exit_code, left(root)) == (1, [10, 40])
    assert "iter_0000010" in shown.stderr


def test_an_iteration_directory_is_no_root(root: Path) -> None:
    shown = call("prune", root / "iter_0000010", "--keep", 1, "--yes")
    assert shown.exit_code == 2
    assert "give the root" in " ".join(shown.stderr.replace("│", " ").split())


def test_a_removal_leaves_no_half(root: Path) -> None:
    """What is removed is renamed first: iterations() never sees a half."""
    handmade.make(root / "iter_0000001")
    os.utime(root / "latest_checkpointed_iteration.txt")  # else a save would be about to name it
    assert data("prune", root, "--keep", 4, "--yes")["removed"] == ["iter_0000001"]
    assert list(root.glob(".deleted-*")) == []


def test_an_object_store_is_pruned_as_well() -> None:
    root = UPath("memory://prune")
    for number in NUMBERS:
        iteration(root, number)
    (root / "latest_checkpointed_iteration.txt").write_text("20")
    assert data("prune", str(root), "--keep", 1, "--yes")["removed"] == ["iter_0000010", "iter_0000030"]
    assert [number for number in NUMBERS if (root / f"iter_{number:07d}" / "manifest.json").exists()] == [20, 40]


def test_an_empty_path_is_no_directory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unset variable of a shell is enough: prune "$ROOT" --keep 1 --yes."""
    monkeypatch.chdir(root)
    for place in ("", " "):
        refused = call("prune", place, "--keep", "1", "--yes")
        assert refused.exit_code != 0
        assert "an empty path" in refused.stderr
    assert left(root) == list(NUMBERS)
