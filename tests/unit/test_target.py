# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A save destroys checkpoints and nothing else: what may be replaced, on a file system and in an object store."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from upath import UPath

from mbridge_fsdp_ckpt.commit import lease, methods, removal
from mbridge_fsdp_ckpt.commit.content import Content
from mbridge_fsdp_ckpt.commit.marker import MarkerCommit
from mbridge_fsdp_ckpt.commit.rename import RenameCommit
from mbridge_fsdp_ckpt.commit.retention import prune, remove_unless_kept
from mbridge_fsdp_ckpt.commit.target import check_replaceable, obstacle
from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.io.object_store import ObjectStore
from mbridge_fsdp_ckpt.io.store import AnyPath, as_path
from mbridge_fsdp_ckpt.tools.convert.destination import check_free
from mbridge_fsdp_ckpt.tools.prune import plan_pruning
from mbridge_fsdp_ckpt.tools.repair import plan_repair
from tests.unit.handmade import without_tensors

TOKEN = "0123456789ab"
HEAD = '{\n "format": "fsdp_dtensor_safe",'


@pytest.fixture(params=["file system", "object store"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> AnyPath:
    if request.param == "file system":
        return tmp_path
    place = UPath(f"memory://{uuid.uuid4().hex}")
    place.mkdir()
    return place


def fill(directory: Any, *files: str) -> Any:
    """A directory with these files, whose content says what they are."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in files:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(HEAD if name.endswith("manifest.json") else name)
    return directory


def age(path: Path) -> None:
    os.utime(path, (time.time() - lease.STALE_S - 5,) * 2)


OURS = ("manifest.json", "__0_0.distcp", "rank_00000.index", "group_00000.index")
REPLACED = {
    "empty": (),
    "ours": OURS,
    "ours, with DCP metadata": (*OURS, ".metadata", "__0_1.distcp"),
    "ours, of an object store": ("manifest.json", f"__0_0-{TOKEN}.distcp", f"rank_00000-{TOKEN}.index"),
    "Bridge's": (*OURS, "run_config.yaml", "train_state.pt", "tokenizer/tokenizer.json", "tokenizer/config.json"),
    "with files of somebody's": (*OURS, "notes.txt", "plots/loss.png", "web/.metadata/x"),
    "stock's": (".metadata", "__0_0.distcp", "common.json", "run_config.yaml"),
    "without its payload": ("manifest.json", "run_config.yaml"),
    "without its manifest": ("__0_0.distcp", "rank_00000.index", "run_config.yaml"),
    "objects of a dead save": (f"__3_0-{TOKEN}.distcp", "assets/vocabulary.txt"),
    "left by a removal": (f".deleted-iter_0000001-{TOKEN}/manifest.json",),
    "left by a tracker": (f".latest_checkpointed_iteration.txt.{TOKEN}.new",),
}
REFUSED = {
    "a run": (("iter_0000001/manifest.json", "tensorboard/events", "train.py"), "a root of checkpoints, with iter_0"),
    "a tracker": (("latest_checkpointed_iteration.txt",), "a root of checkpoints"),
    "Bridge's tracker": (("latest_train_state.pt",), "a root of checkpoints"),
    "a root with metadata": ((*OURS, "iter_0000001/manifest.json"), "a root of checkpoints"),
    "VeRL's model": (("dist_ckpt/.metadata", "huggingface/config.json"), "a root of checkpoints, with dist_ckpt"),
    "a root with a checkpoint put aside": ((f".replaced-release-{TOKEN}/manifest.json",), "a root of checkpoints"),
    "torch_dist": ((".metadata", "metadata.json", "common.pt", "__0_0.distcp"), r"another format \(torch_dist\)"),
    "Hugging Face": (("config.json", "model.safetensors"), "a Hugging Face model, with config.json"),
    "sources": (("train.py", "a", "b", "c", "d", "e", "f"), "no checkpoint, with a, b, c, d, e and 2 more"),
    "what calls itself hidden": ((".staging-area/plan.txt",), "no checkpoint, with .staging-area"),
}


@pytest.mark.parametrize("files", REPLACED.values(), ids=REPLACED)
def test_a_checkpoint_and_what_is_left_of_one_may_be_replaced(root: AnyPath, files: tuple[str, ...]) -> None:
    check_replaceable(fill(root / "target", *files))


@pytest.mark.parametrize(("files", "says"), REFUSED.values(), ids=REFUSED)
def test_everything_else_is_refused_by_name(root: AnyPath, files: tuple[str, ...], says: str) -> None:
    target = fill(root / "target", *files)
    with pytest.raises(ConfigurationError, match=says) as refused:
        check_replaceable(target)
    assert refused.value.key == str(target)
    assert "iter_0000001" in refused.value.remedy


def test_a_manifest_of_something_else_makes_no_checkpoint(root: AnyPath) -> None:
    (fill(root / "target", "index.html") / "manifest.json").write_text('{"short_name": "a web application"}')
    with pytest.raises(ConfigurationError, match=r"with index\.html, manifest\.json"):
        check_replaceable(root / "target")


def test_nothing_and_a_file(root: AnyPath) -> None:
    check_replaceable(root / "not" / "there")
    (root / "target").write_text("somebody's")
    with pytest.raises(ConfigurationError, match="found a file"):
        check_replaceable(root / "target")


@pytest.mark.parametrize("dots", [".", ".."])
def test_a_path_that_ends_in_dots_has_no_name_to_rename_to(root: AnyPath, dots: str) -> None:
    fill(root / "target" / "sub", *OURS)
    place = as_path(f"{root}/target/sub/{dots}")
    if place.name == "sub":  # what pathlib makes of a dot
        check_replaceable(place)
    else:
        with pytest.raises(ConfigurationError, match=rf"a path that ends in {dots}"):
            check_replaceable(place)


def test_a_url_with_a_slash_at_its_end_is_the_same_place(tmp_path: Path) -> None:
    root = f"memory://{uuid.uuid4().hex}"
    fill(as_path(root) / "target", *OURS)
    fill(as_path(root) / "sources", "train.py")
    check_replaceable(as_path(f"{root}/target/"))
    with pytest.raises(ConfigurationError, match=r"train\.py"):
        check_replaceable(as_path(f"{root}/sources/"))
    fill(tmp_path / "sources", "train.py")
    with pytest.raises(ConfigurationError, match=r"train\.py"):
        check_replaceable(as_path(f"{tmp_path}/x/../sources/"))


def test_the_working_directory_and_what_it_lies_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = fill(tmp_path / "run" / "iter_0000001", *OURS)
    check_replaceable(here)
    (tmp_path / "other").symlink_to(tmp_path / "run")
    for working in (here, tmp_path / "other" / "iter_0000001"):
        with pytest.raises(ConfigurationError, match="found the working directory"):
            check_replaceable(here, working)
    monkeypatch.chdir(here)
    for place in (as_path("../iter_0000001"), here):
        with pytest.raises(ConfigurationError, match="found the working directory"):
            check_replaceable(place)
    for place in (tmp_path / "run", tmp_path, Path("/")):
        with pytest.raises(ConfigurationError, match="a parent of the working directory"):
            check_replaceable(place)
    check_replaceable(here / "sub")


def test_a_link_is_never_replaced(tmp_path: Path) -> None:
    link, ours = tmp_path / "link", fill(tmp_path / "ours", *OURS)
    for to, says in ((ours, "a link to .*ours"), (tmp_path / "gone", "a link to .*gone, which does not exist")):
        link.symlink_to(to)
        with pytest.raises(ConfigurationError, match=says):
            check_replaceable(link)
        link.unlink()
    link.symlink_to(tmp_path)
    check_replaceable(link / "ours")


def test_a_folder_without_files_is_empty_and_one_with_a_link_is_not(root: AnyPath) -> None:
    (root / "target" / "a" / "b").mkdir(parents=True)
    check_replaceable(root / "target")
    if isinstance(root, Path):
        (root / "target" / "a" / "b" / "link").symlink_to("elsewhere")
        assert obstacle(root / "target") is not None


def test_the_staging_of_a_living_job_is_no_leftover(tmp_path: Path) -> None:
    staging = fill(tmp_path / "runs" / f".staging-iter_0000001-{TOKEN}", "__0_0.distcp")
    assert obstacle(tmp_path / "runs") is not None
    age(staging)
    assert obstacle(tmp_path / "runs") is None


def test_what_may_not_be_looked_into_is_an_error_and_no_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    fill(tmp_path / "target", *OURS)
    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(PermissionError):
        check_replaceable(tmp_path / "target")


# --- who asks ---


def test_what_came_while_a_save_wrote_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "iter_0000001"
    commit = RenameCommit(target)
    fill(target, "notes.txt")
    with pytest.raises(ConfigurationError, match=r"notes\.txt"):
        commit.finish(Content(lambda files: HEAD.encode(), lambda name: True))
    assert (target / "notes.txt").read_text() == "notes.txt"


def uploaded(target: AnyPath, *, dies: bool) -> MarkerCommit:
    """A save into an object store that fails just before its manifest."""
    commit = MarkerCommit(target)
    fill(target, f"__0_0{commit.suffix}.distcp", f"rank_00000{commit.suffix}.index")

    def fails() -> None:
        raise KeyboardInterrupt

    add: Callable[[Path], Any] = lambda folder: fill(folder, "assets/vocabulary.txt")  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        commit.finish(Content(lambda files: HEAD.encode(), lambda name: True, add, last_call=fails))
    if not dies:
        commit.abort()
    return commit


def test_a_marker_commit_that_died_may_be_saved_over_however_often(root: AnyPath) -> None:
    """What tells that its files are nobody's is deleted last."""
    target = root / "iter_0000001"
    uploaded(target, dies=True)
    for _ in range(2):
        check_replaceable(target)
        for path in methods.condemn_leftovers(target, "marker"):
            assert removal.delete(path)
        check_replaceable(target)


@pytest.mark.parametrize("death_at", range(6))
def test_a_removal_in_an_object_store_that_died_half_way_may_be_saved_over(
    death_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = fill(UPath(f"memory://{uuid.uuid4().hex}/iter_0000001"), *OURS[:3], "run_config.yaml", "a/b", "z")
    original, count = ObjectStore.remove, 0

    def remove(self: ObjectStore) -> None:
        nonlocal count
        if count == death_at:
            raise KeyboardInterrupt
        count += 1
        original(self)

    monkeypatch.setattr(ObjectStore, "remove", remove)
    with pytest.raises(KeyboardInterrupt):
        methods.remove(target)
    check_replaceable(target)


def test_pruning_removes_only_what_a_save_might_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2, 3, 5, 6):
        fill(tmp_path / f"iter_{number:07d}", *OURS)
    (tmp_path / "iter_0000006" / "manifest.json").write_bytes(without_tensors())  # one that can be read
    fill(tmp_path / "iter_0000002" / "iter_0000001", *OURS)
    (tmp_path / "iter_0000004").symlink_to(fill(tmp_path / "elsewhere", *OURS))
    fill(tmp_path / ".reading-list", "somebody's")
    age(tmp_path / ".reading-list")
    (tmp_path / ".reading-notes").write_text("somebody's")
    age(tmp_path / ".reading-notes")
    monkeypatch.chdir(tmp_path / "iter_0000003")
    plan = plan_pruning(tmp_path, 1)
    assert [iteration.number for iteration in plan.doomed] == [1, 5]
    assert "a root of checkpoints" in plan.kept["iter_0000002"]
    assert "the working directory" in plan.kept["iter_0000003"]
    assert "a link to" in plan.kept["iter_0000004"]
    assert not remove_unless_kept(tmp_path / "iter_0000004")
    assert [iteration.number for iteration in prune(tmp_path, 1)] == [1, 5]
    assert (tmp_path / "elsewhere" / "manifest.json").is_file()
    assert (tmp_path / ".reading-list" / "somebody's").is_file()
    assert (tmp_path / ".reading-notes").is_file()


def test_repair_and_saves_delete_only_what_is_called_like_a_leftover(tmp_path: Path) -> None:
    for name in (".staging-area", ".deleted-mails", ".replaced-parts", ".staging-x-0", ".reading-list"):
        age(fill(tmp_path / name, "somebody's"))
    (tmp_path / f".staging-iter_0000002-{TOKEN}").symlink_to(fill(tmp_path / "elsewhere", "somebody's"))
    fill(tmp_path, "manifest.json")
    assert methods.condemn_leftovers(tmp_path / "iter_0000001") == []
    assert plan_repair(tmp_path, force=True).deletes == []


@pytest.mark.parametrize("leads_to", ["gone", "empty"])
def test_nothing_is_moved_back_over_a_link(tmp_path: Path, leads_to: str) -> None:
    aside = fill(tmp_path / f".replaced-iter_0000001-{TOKEN}", *OURS)
    (tmp_path / "empty").mkdir()
    link = tmp_path / "iter_0000001"
    link.symlink_to(leads_to)
    assert not methods.recover(link)
    plan = plan_repair(tmp_path, force=True)
    assert [place for place, _ in plan.broken] == [aside]
    assert link.is_symlink()
    assert aside.is_dir()


def test_a_conversion_goes_to_no_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("gone")
    with pytest.raises(ConfigurationError, match="a link to gone, which does not exist"):
        check_free(tmp_path / "link", tmp_path / "source")
