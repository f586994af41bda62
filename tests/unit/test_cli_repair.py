# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`repair`: what a death leaves is put right, and nothing that is complete or alive is touched."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from upath import UPath

from mbridge_fsdp_ckpt.commit import methods, removal
from mbridge_fsdp_ckpt.errors import DamagedCheckpointError
from mbridge_fsdp_ckpt.format.manifest import read_manifest
from mbridge_fsdp_ckpt.io.checksums import checksum
from mbridge_fsdp_ckpt.io.entries import ExtraEntry
from mbridge_fsdp_ckpt.opening import open_checkpoint
from mbridge_fsdp_ckpt.settings import Settings
from mbridge_fsdp_ckpt.tools import size_and_age
from mbridge_fsdp_ckpt.tools.command import console as frame
from mbridge_fsdp_ckpt.tools.repair import plan_repair
from tests import trackers
from tests.golden import archive
from tests.unit import handmade
from tests.unit.handmade import payload, write_manifest
from tests.unit.shards import shards
from tests.unit.test_cli import call, data, run
from tests.unit.test_saving import prepared, save

TRACKER, STATE = "latest_checkpointed_iteration.txt", "latest_train_state.pt"
TEN, TWENTY = trackers.state(10), trackers.state(20)
TOKEN = "0123456789ab"


def make(root: Path, number: int, state: bytes | None = None) -> Path:
    directory = handmade.make(root / f"iter_{number:07d}")
    if state is not None:
        (directory / "train_state.pt").write_bytes(state)
        entry = ExtraEntry(name="train_state.pt", size=len(state), checksum=checksum(state))
        write_manifest(directory / "manifest.json", read_manifest(directory).model_copy(update={"files": (entry,)}))
    return directory


def age(path: Path, seconds: float = 4000) -> Path:
    """Nobody has touched it for that long."""
    for place in (path, *path.rglob("*")):
        os.utime(place, (time.time() - seconds,) * 2)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two checkpoints; the tracker names the newer one."""
    make(tmp_path, 10, TEN)
    make(tmp_path, 20, TWENTY)
    (tmp_path / TRACKER).write_text("20")
    (tmp_path / STATE).write_bytes(TWENTY)
    return tmp_path


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


WHOLE = ["iter_0000010", "iter_0000020", TRACKER, STATE]


def done(found: Any) -> list[tuple[str, str]]:
    assert all(step["done"] for step in found["steps"])
    return [(step["action"], Path(step["path"]).name) for step in found["steps"]]


def test_a_root_in_order_is_left_alone(root: Path) -> None:
    assert data("repair", root) == {
        "root": str(root),
        "dry_run": False,
        "steps": [],
        "left_alone": [],
        "broken": [],
    }
    assert call("repair", root).stdout.splitlines() == [str(root), "Nothing to do."]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "missing"),
        ("", "illegible: ''"),
        ("ten", "illegible: 'ten'"),
        ("../iter_0000010", "illegible: '../iter_0000010'"),
        ("30", "names iter_0000030, which is not there"),
        ("40", "names iter_0000040, which is not complete"),
        ("release", "names release, which is not there"),
    ],
)
def test_the_tracker_is_rebuilt(root: Path, content: str | None, why: str) -> None:
    (root / "iter_0000040").mkdir()
    (root / STATE).write_bytes(b"state of something else")
    (root / TRACKER).unlink()
    if content is not None:
        (root / TRACKER).write_text(content)
    found = data("repair", root)
    assert done(found) == [("write", STATE), ("write", TRACKER)]
    assert found["steps"][1]["why"] == f"{why}; iter_0000020 is the newest complete and readable checkpoint"
    assert (root / TRACKER).read_bytes() == b"20"
    assert (root / STATE).read_bytes() == TWENTY
    assert data("repair", root)["steps"] == []


def test_a_tracker_that_names_something_complete_is_never_changed(root: Path) -> None:
    for number in (10, 20):
        (root / TRACKER).write_text(f"{number}\n")
        assert data("repair", root)["steps"] == []
        assert (root / TRACKER).read_text() == f"{number}\n"


def test_a_release_is_something_complete(root: Path) -> None:
    handmade.make(root / "release")
    (root / TRACKER).write_text("release")
    (root / STATE).unlink()
    assert data("repair", root)["steps"] == []


def test_a_complete_checkpoint_that_is_damaged_is_not_named(root: Path) -> None:
    (root / "iter_0000020" / payload(1)).unlink()
    (root / TRACKER).unlink()
    (root / STATE).unlink()
    found = data("repair", root)
    assert (root / TRACKER).read_text() == "10"
    assert (root / STATE).read_bytes() == TEN
    [left] = found["left_alone"]
    assert left["path"] == str(root / "iter_0000020")
    assert payload(1) in left["why"]


def test_a_tracker_that_names_something_damaged_is_left_alone_and_said(root: Path) -> None:
    (root / "iter_0000020" / payload(1)).unlink()
    found = data("repair", root)
    assert found["steps"] == []
    assert "names iter_0000020, which is complete but not readable" in found["left_alone"][0]["why"]


def test_without_a_readable_checkpoint_it_ends_with_1(root: Path) -> None:
    for number in (10, 20):
        (root / f"iter_{number:07d}" / payload(1)).unlink()
    (root / TRACKER).write_text("30")
    (root / STATE).unlink()
    found = data("repair", root, code=1)
    assert found["broken"] == [
        {
            "path": str(root / TRACKER),
            "why": "names iter_0000030, which is not there, and no checkpoint is readable",
        }
    ]
    assert (root / TRACKER).read_text() == "30"


def test_an_empty_root_needs_no_tracker(tmp_path: Path) -> None:
    assert data("repair", tmp_path)["steps"] == []
    (tmp_path / TRACKER).write_text("10")
    assert "no complete checkpoint to name" in data("repair", tmp_path, code=1)["broken"][0]["why"]


def test_bridges_tracker_goes_where_it_is_wrong_and_cannot_be_rebuilt(root: Path) -> None:
    make(root, 30)
    (root / TRACKER).unlink()
    (root / STATE).write_bytes(b"state of something else")
    found = data("repair", root, "--yes")
    assert done(found) == [("delete", STATE), ("write", TRACKER)]
    assert found["steps"][0]["why"].endswith(", and iter_0000030 has no train_state.pt")
    assert ((root / TRACKER).read_text(), (root / STATE).exists()) == ("30", False)


@pytest.mark.parametrize("wrong", [TRACKER, STATE])
def test_what_one_tracker_names_goes_before_the_newest(wrong: str, root: Path) -> None:
    make(root, 30, trackers.state(30))
    (root / wrong).write_bytes(b"garbage")
    found = data("repair", root)
    assert done(found) == [("write", STATE), ("write", TRACKER)]
    assert found["steps"][1]["why"].endswith(f"; {TRACKER if wrong == STATE else STATE} names iter_0000020")
    assert ((root / TRACKER).read_text(), (root / STATE).read_bytes()) == ("20", TWENTY)


def test_trackers_that_contradict_each_other_are_for_people_to_choose(root: Path) -> None:
    (root / STATE).write_bytes(TEN)
    found = data("repair", root, code=1)
    assert (found["steps"], [broken["path"] for broken in found["broken"]]) == ([], [str(root / STATE)])
    assert f"iter_0000010, and iter_0000020 in {TRACKER}" in found["broken"][0]["why"]


def test_a_damaged_train_state_is_not_copied(root: Path) -> None:
    (root / "iter_0000020" / "train_state.pt").write_bytes(TWENTY[::-1])
    (root / TRACKER).unlink()
    shown = call("repair", root)
    assert shown.exit_code == 1
    assert shown.stderr.startswith("DamagedCheckpointError: ")
    assert not (root / TRACKER).exists()


def test_an_old_checkpoint_is_moved_back(root: Path) -> None:
    (root / "iter_0000020").rename(root / f".replaced-iter_0000020-{TOKEN}")
    found = data("repair", root)
    assert done(found) == [("move back", f".replaced-iter_0000020-{TOKEN}")]
    assert names(root) == WHOLE


def test_an_old_checkpoint_is_moved_back_over_an_empty_directory(root: Path) -> None:
    age((root / "iter_0000020").rename(root / f".replaced-iter_0000020-{TOKEN}"))
    (root / "iter_0000020").mkdir()
    found = data("repair", root, "--yes")
    assert done(found) == [("move back", f".replaced-iter_0000020-{TOKEN}")]
    assert found["steps"][0]["why"] == "iter_0000020 is empty: its save died between two renames"
    assert names(root) == WHOLE
    assert (root / "iter_0000020" / "manifest.json").is_file()


def test_an_old_checkpoint_is_kept_where_something_else_took_its_place(root: Path) -> None:
    aside = age((root / "iter_0000020").rename(root / f".replaced-iter_0000020-{TOKEN}"))
    (root / "iter_0000020").mkdir()
    (root / "iter_0000020" / "notes.txt").write_text("somebody's")
    found = data("repair", root, "--yes", "--force", code=1)
    assert [broken["path"] for broken in found["broken"]] == [str(aside)]
    assert (aside / "manifest.json").is_file()
    assert (root / TRACKER).read_text() == "10", "the newest that is in its place"
    assert (root / "iter_0000020" / "notes.txt").read_text() == "somebody's"


def test_an_old_checkpoint_that_comes_back_may_be_named(root: Path) -> None:
    (root / "iter_0000020").rename(root / f".replaced-iter_0000020-{TOKEN}")
    (root / TRACKER).write_text("garbage")
    (root / STATE).unlink()
    found = data("repair", root)
    assert done(found) == [("move back", f".replaced-iter_0000020-{TOKEN}"), ("write", STATE), ("write", TRACKER)]
    assert (root / TRACKER).read_text() == "20"
    assert (root / STATE).read_bytes() == TWENTY


@pytest.mark.parametrize("kind", ["staging", "deleted", "replaced"])
def test_what_dead_saves_left_is_deleted(root: Path, kind: str) -> None:
    leftover = handmade.make(root / f".{kind}-iter_0000020-{TOKEN}")
    age(leftover)
    found = data("repair", root, "--yes")
    assert done(found) == [("delete", leftover.name)]
    assert names(root) == WHOLE


def test_what_may_be_alive_is_left_alone(root: Path) -> None:
    """One file that was written just now is enough."""
    leftover = age(handmade.make(root / f".staging-iter_0000030-{TOKEN}"))
    os.utime(leftover / payload(0))
    found = data("repair", root, "--yes")
    assert found["steps"] == []
    assert found["left_alone"] == [
        {"path": str(leftover), "why": "touched within the last hour: a save may be in progress (--force)"}
    ]
    assert data("repair", root, "--yes", "--force")["steps"][0]["done"]
    assert names(root) == WHOLE


@pytest.mark.parametrize("meanwhile", ["renewed", "committed", "linked", "removed", "read", "published"])
def test_what_changes_until_the_answer_is_looked_at_again(root: Path, meanwhile: str) -> None:
    """A question waits as long as people do."""
    dead, other = root / "iter_0000030", root / f".staging-iter_0000050-{TOKEN}"
    handmade.make(dead).joinpath("manifest.json").rename(root / "metadata")
    for path in [dead / payload(0), dead / "group_00000.index"]:
        path.rename(path.with_stem(f"{path.stem}-{TOKEN}"))
    lease = root / f".reading-iter_0000010-{TOKEN}"
    lease.touch()
    for path in (dead, handmade.make(other), lease):
        age(path)
    aside = age((root / "iter_0000010").rename(root / f".replaced-iter_0000010-{TOKEN}"))
    shutil.copytree(aside, root / "iter_0000010")
    if meanwhile == "published":
        (root / TRACKER).write_text("garbage")
        (root / STATE).unlink()
    plan = plan_repair(root, force=False)
    if meanwhile == "renewed":
        os.utime(other / payload(0))
        stays = other
    elif meanwhile == "committed":
        (root / "metadata").rename(dead / "manifest.json")
        stays = dead / f"group_00000-{TOKEN}.index"
    elif meanwhile == "linked":
        stays = dead.rename(root / "somebody's") / f"group_00000-{TOKEN}.index"
        dead.symlink_to("somebody's")
    elif meanwhile == "removed":
        shutil.rmtree(root / "iter_0000010")
        stays = aside
    elif meanwhile == "read":
        lease.touch()
        stays = lease
    else:
        (root / TRACKER).write_text("10")
        stays = root / TRACKER
    taken = [step.path for step in plan.carry_out()]
    assert stays.exists()
    assert stays not in taken
    assert meanwhile != "published" or (root / TRACKER).read_text() == "10"
    assert len(taken) == {"committed": 3, "linked": 3, "published": 5}.get(meanwhile, 4)


@pytest.mark.parametrize("linked", [False, True])
def test_a_directory_in_the_place_of_a_tracker_is_for_people(root: Path, linked: bool) -> None:
    make(root, 30)
    (root / TRACKER).unlink()
    (root / STATE).unlink()
    notes = root / ("kept" if linked else STATE) / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("somebody's")
    if linked:
        (root / STATE).symlink_to("kept")
    found = data("repair", root, "--yes", code=1)
    assert [broken["path"] for broken in found["broken"]] == [str(root / STATE)]
    assert notes.read_text() == "somebody's"
    assert not (root / TRACKER).exists()


@pytest.mark.parametrize(("seconds", "goes"), [(3500, False), (3700, True)])
def test_an_hour_is_the_limit(root: Path, seconds: float, goes: bool) -> None:
    age(handmade.make(root / f".staging-iter_0000030-{TOKEN}"), seconds)
    assert bool(data("repair", root, "--yes")["steps"]) is goes


def test_marks_of_dead_readers_are_deleted_and_those_of_living_ones_never(root: Path) -> None:
    dead, alive = root / f".reading-iter_0000010-{TOKEN}", root / f".reading-iter_0000020-{TOKEN}"
    dead.touch()
    alive.touch()
    age(dead)
    found = data("repair", root, "--yes", "--force")
    assert done(found) == [("delete", dead.name)]
    assert found["left_alone"] == [{"path": str(alive), "why": "somebody reads that checkpoint"}]
    assert alive.exists()


def test_objects_of_dead_saves_by_marker_are_deleted(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    dead = root / "iter_0000030"
    dead.mkdir()
    for name in (f"__0_0-{TOKEN}.distcp", f"rank_00000-{TOKEN}.index", "notes.txt"):
        (dead / name).write_bytes(b"x")
    age(dead)
    (root / "elsewhere").symlink_to(shutil.copytree(dead, tmp_path_factory.mktemp("elsewhere") / "run"))
    age(root / "elsewhere" / ".")
    found = data("repair", root, "--yes")
    assert done(found) == [("delete", f"__0_0-{TOKEN}.distcp"), ("delete", f"rank_00000-{TOKEN}.index")]
    assert names(dead) == ["notes.txt"]
    assert len(names(root / "elsewhere")) == 3, "nothing behind a link is the root's"


@pytest.mark.parametrize("state", ["dead", "running", "committed", "committed meanwhile"])
@pytest.mark.parametrize("local", [True, False])
def test_added_files_of_a_running_or_committed_save_are_left_alone(
    local: bool, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie in a folder; what tells that their save is alive, or has committed, lies beside that."""
    root: Any = tmp_path if local else UPath(f"memory://{tmp_path.name}")
    dead, added = root / "iter_0000030", f"__added-{TOKEN}"
    (dead / added).mkdir(parents=True)
    (dead / added / "run_config.yaml").write_text("x")
    (dead / f"__0_0-{TOKEN}.distcp").write_text("x")
    if local:
        age(dead)
    if state == "committed meanwhile":
        monkeypatch.setattr(methods, "discard", lambda path: (dead / "manifest.json").write_text("{}"))
    plan = plan_repair(root, force=not local)
    assert len(plan.deletes) == 2
    if state == "running" and local:
        os.utime(dead / f"__0_0-{TOKEN}.distcp")
    elif state in ("running", "committed"):
        (dead / "manifest.json").write_text("{}")
    assert len(plan.carry_out()) == {"dead": 2, "committed meanwhile": 1}.get(state, 0)
    assert (dead / added / "run_config.yaml").exists() is (state != "dead")


def test_what_stock_reads_without_its_manifest_is_left_alone(tmp_path: Path) -> None:
    """Its objects are called like those of a dead save; a save that fails there leaves them as well."""
    lost, old = tmp_path / "iter_0000010", f"__0_0-{TOKEN}.distcp"
    save(lost, [prepared(shards(0, 12))], Settings(commit="marker", dcp_metadata="always"))
    assert removal.wait(30.0)
    (lost / "manifest.json").unlink()
    (lost / old).write_bytes(b"of a save that died")
    before = set(names(lost))
    found = data("repair", age(tmp_path), "--yes", code=1)
    assert [Path(step["path"]).name for step in found["steps"]] == [old]
    assert "names that save's files: manifest.json is lost" in found["left_alone"][-1]["why"]
    assert set(names(lost)) == before - {old}
    assert methods.condemn_leftovers(lost, "marker") == []
    with pytest.raises(DamagedCheckpointError, match="index files"):
        open_checkpoint(lost)


def test_what_a_dead_save_left_in_a_stock_checkpoint_does_not_damage_it(tmp_path: Path) -> None:
    directory = tmp_path / "iter_0000010"
    archive.unpack(Path(archive.__file__).parent / "stock-0.19" / "torch_adam_1_rank.tar.xz", directory)
    dead = [directory / f"__0_0-{TOKEN}.distcp", directory / f"rank_00000-{TOKEN}.index"]
    for path in dead:
        path.write_bytes(b"x")
    assert open_checkpoint(directory).metadata.keys
    found = data("repair", age(tmp_path), "--yes")
    assert (tmp_path / TRACKER).read_text() == "10"
    assert [step["path"] for step in found["steps"] if step["action"] == "delete"] == [str(path) for path in dead]


def test_a_tracker_names_a_directory_of_exactly_its_name(root: Path) -> None:
    (root / "iter_0000020").rename(root / "iter_20")
    assert done(data("repair", root)) == [("write", STATE), ("write", TRACKER)]
    assert (root / TRACKER).read_text() == "10"


def test_a_death_while_an_old_one_is_deleted_leaves_no_half_to_be_moved_back(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(path: Path) -> None:
        raise KeyboardInterrupt

    aside = age(handmade.make(root / f".replaced-iter_0000020-{TOKEN}"))
    plan = plan_repair(root, force=False)
    monkeypatch.setattr("shutil.rmtree", dies)
    with pytest.raises(KeyboardInterrupt):
        plan.carry_out()
    assert [aside.exists(), methods.put_aside(root), len(list(root.glob(".deleted-*")))] == [False, {}, 1]


def test_an_old_one_that_becomes_the_last_while_it_is_deleted_stays(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside, original = age(handmade.make(root / f".replaced-iter_0000020-{TOKEN}")), Path.rename

    def rename(self: Path, to: Path) -> Path:
        if self == aside:
            shutil.rmtree(root / "iter_0000020")
        return original(self, to)

    monkeypatch.setattr(Path, "rename", rename)
    plan_repair(root, force=False).carry_out()
    assert (aside / "manifest.json").is_file()


def test_a_root_is_searched_once_however_many_leftovers_it_has(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "iter_0000030").mkdir()
    for rank in range(8):
        (root / "iter_0000030" / f"__{rank}_0-{TOKEN}.distcp").write_bytes(b"x")
    age(root)
    searched, leftovers, young = list[str](), methods.leftovers, size_and_age.is_young

    def search(root: Any) -> Any:
        searched.append("leftovers")
        return leftovers(root)

    def ask(place: Any) -> bool:
        searched.append(place.name)
        return young(place)

    monkeypatch.setattr(methods, "leftovers", search)
    monkeypatch.setattr("mbridge_fsdp_ckpt.tools.repair.is_young", ask)
    assert len(plan_repair(root, force=False).carry_out()) == 8
    assert searched == ["leftovers", "iter_0000030", "iter_0000030"]


def test_an_old_object_beside_a_new_one_is_left_alone(root: Path) -> None:
    dead = root / "iter_0000030"
    dead.mkdir()
    for rank in (0, 1):
        (dead / f"__{rank}_0-{TOKEN}.distcp").write_bytes(b"x")
    age(dead)
    os.utime(dead / f"__1_0-{TOKEN}.distcp")
    found = data("repair", root, "--yes")
    assert (found["steps"], len(found["left_alone"])) == ([], 2)


def test_nothing_committed_is_ever_deleted(root: Path) -> None:
    (root / "iter_0000010" / payload(0)).unlink()
    (root / "iter_0000020" / "manifest.json").write_bytes(b"")
    before = sorted(path for path in root.rglob("*"))
    data("repair", age(root), "--yes", "--force")
    assert sorted(path for path in root.rglob("*")) == before


def test_a_dry_run_changes_nothing(root: Path) -> None:
    age(handmade.make(root / f".staging-iter_0000030-{TOKEN}"))
    (root / TRACKER).write_text("x")
    before = names(root)
    shown = call("repair", root, "--dry-run")
    assert shown.exit_code == 0
    assert shown.stdout.splitlines()[-1] == "3 to do; nothing was changed (--dry-run)."
    assert (names(root), (root / TRACKER).read_text()) == (before, "x")


def test_without_a_terminal_and_without_yes_nothing_is_changed(root: Path) -> None:
    age(handmade.make(root / f".staging-iter_0000030-{TOKEN}"))
    (root / TRACKER).write_text("x")
    for code in (call("repair", root).exit_code, run("repair", str(root)).returncode):
        assert code == 2
        assert (root / TRACKER).read_text() == "x"
        assert f".staging-iter_0000030-{TOKEN}" in names(root)


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1)])
def test_on_a_terminal_it_asks(root: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int) -> None:
    monkeypatch.setattr(frame, "is_interactive", lambda: True)
    leftover = age(handmade.make(root / f".staging-iter_0000030-{TOKEN}"))
    shown = call("repair", root, answer=answer)
    assert shown.exit_code == code
    assert "Delete 1 leftover?" in shown.output
    assert leftover.exists() is bool(code)


def test_shown_it_says_what_was_done_and_what_was_left(root: Path) -> None:
    age(handmade.make(root / f".staging-iter_0000030-{TOKEN}"))
    handmade.make(root / f".staging-iter_0000040-{TOKEN}")
    lines = call("repair", root, "--yes").stdout.splitlines()
    assert lines[1].startswith(f"  delete     .staging-iter_0000030-{TOKEN}  (left by a save or a removal that died, ")
    assert lines[2].startswith(f"  left alone .staging-iter_0000040-{TOKEN}  (touched within the last hour")
    assert lines[3] == "1 done."


def test_an_iteration_directory_is_no_root(root: Path) -> None:
    assert call("repair", root / "iter_0000020").exit_code == 2


def test_an_object_store_is_repaired_as_well(root: Path) -> None:
    """This one does not tell how old its objects are: they may be young."""
    store = UPath("memory://repair")
    for path in (root / "iter_0000020").iterdir():
        (store / "iter_0000020" / path.name).write_bytes(path.read_bytes())
    (store / "iter_0000030" / f"__0_0-{TOKEN}.distcp").write_bytes(b"x")
    found = data("repair", str(store), "--yes")
    assert [step["action"] for step in found["steps"]] == ["write", "write"]
    assert [left["path"] for left in found["left_alone"]] == [f"{store}/iter_0000030/__0_0-{TOKEN}.distcp"]
    assert (store / TRACKER).read_text() == "20"
    assert (store / STATE).read_bytes() == TWENTY
    assert done(data("repair", str(store), "--yes", "--force")) == [("delete", f"__0_0-{TOKEN}.distcp")]
