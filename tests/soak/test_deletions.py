# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Whatever deletes: what no rule names stays byte for byte, what is to go is gone, and nothing else changes."""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from mbridge_fsdp_ckpt.commit import methods, removal, retention
from mbridge_fsdp_ckpt.commit.retention import prune, prune_later, reading, remove_later
from mbridge_fsdp_ckpt.errors import CheckpointError, ConfigurationError, NotACheckpointError
from mbridge_fsdp_ckpt.io.store import as_path
from mbridge_fsdp_ckpt.saving.commit import Job
from mbridge_fsdp_ckpt.settings import Settings
from mbridge_fsdp_ckpt.tools.convert.job import committing
from mbridge_fsdp_ckpt.tools.prune import plan_pruning
from mbridge_fsdp_ckpt.tools.repair import plan_repair
from tests.core.test_object_stores import BUCKET, environment
from tests.golden import archive
from tests.soak import deletions, sampling
from tests.soak.deletions import EVENTS, LINK, STORES, Case, Files, name_of
from tests.trackers import STATE, TRACKER
from tests.unit.shards import shards
from tests.unit.test_saving import coordination, prepared, save, saved

__all__ = ["environment"]

DRAWS = {"file system": 20, "in memory": 12, "S3": 2}
"""By store: how many cases of each path and event; one on S3 takes ten times as long."""

CASES = [
    (store, p, e, n) for store in STORES for p, events in EVENTS.items() for e in events for n in range(DRAWS[store])
]
"""Store, path, event, and the number of a draw."""

SEED = sampling.seed() if sampling.FULL else 5000
"""The usual check makes the same draws each time: it must not fail by chance."""


def sample(*stores: str) -> list[tuple[str, str, str, int]]:
    """The cases that run now: all, or one in 20."""
    chosen = CASES if sampling.FULL else random.Random(SEED).sample(CASES, len(CASES) // 20)
    return [case for case in chosen if case[0] in stores]


LIMIT_S = 60.0
"""Seconds that the removal thread may take: a rule that hangs is wrong, not slow."""

GOLDEN = Path(archive.__file__).parent / "stock-0.19" / "torch_adam_1_rank.tar.xz"


class Disk:
    """A folder of a file system."""

    def __init__(self, place: Path) -> None:
        self.area: Any = place

    def make(self, files: list[tuple[str, bytes, float]]) -> None:
        """Write them, as old as they are to be; folders are as old as the newest in them."""
        ages: dict[Path, float] = {}
        now = time.time()
        for name, data, age in files:
            path = self.area / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if data.startswith(LINK):
                path.symlink_to(data.removeprefix(LINK).decode())
                continue
            path.write_bytes(data)
            os.utime(path, (now - age, now - age))
            for folder in path.relative_to(self.area).parents:
                ages[self.area / folder] = min(age, ages.get(self.area / folder, age))
        for folder, age in ages.items():
            os.utime(folder, (now - age, now - age))

    def touch(self, name: str) -> None:
        os.utime(self.area / name)

    def clear(self) -> None:
        shutil.rmtree(self.area)

    def seen(self) -> Files:
        found = {}
        for folder, folders, names in self.area.walk():
            for path in (folder / name for name in (*folders, *names)):
                if path.is_symlink():
                    found[str(path.relative_to(self.area))] = LINK + os.fsencode(path.readlink())
                elif path.is_file():
                    found[str(path.relative_to(self.area))] = path.read_bytes()
        return found


class Memory:
    """fsspec's own store, in this process; it tells no times."""

    def __init__(self) -> None:
        self.area: Any = as_path(f"memory://{uuid.uuid4().hex}")

    def _objects(self) -> dict[str, Any]:
        place = f"{self.area.path}/"
        return {name.removeprefix(place): found for name, found in self.area.fs.store.items() if name.startswith(place)}

    def make(self, files: list[tuple[str, bytes, float]]) -> None:
        self.area.fs.pipe({f"{self.area.path}/{name}": data for name, data, _ in files})

    def touch(self, name: str) -> None:
        """It tells no times."""

    def clear(self) -> None:
        """The store goes through all that it has for each listing."""
        for name in self._objects():
            del self.area.fs.store[f"{self.area.path}/{name}"]

    def seen(self) -> Files:
        return {name: found.getvalue() for name, found in self._objects().items()}


class S3:
    """moto's server, whose objects lie in this process."""

    def __init__(self) -> None:
        self.area: Any = as_path(f"s3://{BUCKET}/{uuid.uuid4().hex}")

    def _objects(self) -> dict[str, Any]:
        from moto.s3.models import s3_backends

        keys = s3_backends["123456789012"]["aws"].buckets[BUCKET].keys
        place = self.area.path.partition("/")[2] + "/"
        return {name.removeprefix(place): found for name, found in keys.items() if name.startswith(place)}

    def make(self, files: list[tuple[str, bytes, float]]) -> None:
        self.area.fs.pipe({f"{self.area.path}/{name}": data for name, data, _ in files})
        objects, now = self._objects(), datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
        for name, _, age in files:
            objects[name].last_modified = now - datetime.timedelta(seconds=age)

    def touch(self, name: str) -> None:
        self._objects()[name].last_modified = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)

    def clear(self) -> None:
        """As in memory."""
        self.area.fs.rm(self.area.path, recursive=True)

    def seen(self) -> Files:
        return {name: found.value for name, found in self._objects().items()}


Place = Disk | Memory | S3


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Files]]:
    """Files of real checkpoints by how they were committed."""
    made = tmp_path_factory.mktemp("made")
    archive.unpack(GOLDEN, made / "stock")
    ranks = [prepared(shards(0, 6)), prepared(shards(6, 12))]
    save(made / "rename", ranks, Settings(dcp_metadata="always"))
    save(made / "marker", ranks, Settings(dcp_metadata="always", commit="marker"))
    assert removal.wait(30.0)
    files = {kind.name: {file.name: file.read_bytes() for file in kind.iterdir()} for kind in made.iterdir()}
    return {how: {"ours": files[how], "stock": files["stock"]} for how in ("rename", "marker")}


def add_nothing(folder: Path) -> None:
    raise ConfigurationError(expected="run files", found="none", remedy="none")


def save_to(case: Case, root: Any) -> None:
    """A save of the case's target, of whatever it is made of."""
    settings = Settings(dcp_metadata="never", commit="marker" if case.marker else "auto")

    def follow() -> None:
        if case.event != "nothing":
            with contextlib.suppress(NotACheckpointError):
                prune(root, case.keep)

    fails = case.path == "failed save"
    job = Job(root / case.target, settings, coordination(0), {}, add_nothing if fails else None, follow)
    may = deletions.may_be_saved(case, case.target)
    with pytest.raises(ConfigurationError) if fails or not may else contextlib.nullcontext():
        saved(job, [prepared(shards(0, 12))])


def interrupted(target: Any) -> None:
    """A conversion that somebody ends."""
    with committing(methods.begin(target)) as commit:
        (commit.directory / f"__0_0{commit.suffix}.distcp").write_bytes(b"x")
        raise KeyboardInterrupt


class Running:
    """One case, carried out."""

    def __init__(self, case: Case, place: Place, readers: contextlib.ExitStack) -> None:
        self.case, self.place, self.readers = case, place, readers
        own, other = (place.area / name for name in case.names)
        self.own, self.root = own, place.area / "by-link" if case.has("root through a link") else own
        if case.has("root spelled otherwise"):
            self.root = self.root / "tensorboard" / ".." if case.is_local else as_path(f"{own}/")
        for number in case.of("reader"):
            readers.enter_context(reading(self.root / name_of(number)))
        for number in case.of("reader through a link"):
            readers.enter_context(reading(place.area / f"short-cut-{number}"))
        for number in case.of("reader of the other run"):
            readers.enter_context(reading(other / name_of(number)))

    @contextlib.contextmanager
    def at_the_last_moment(self) -> Iterator[None]:
        """Let the event happen when the first removal has looked, or at the end where none gets there."""
        original, pending = methods.remove, [self.happen]

        def remove(*arguments: Any) -> bool:
            while pending:
                pending.pop()()
            return original(*arguments)

        with patch.object(methods, "remove", remove):
            yield
        while pending:
            pending.pop()()

    def event(self) -> None:
        """What happens between the decision and the deed."""
        if not self.case.late:
            self.happen()

    def happen(self) -> None:
        """The event."""
        case, place, own = self.case, self.place, self.case.names[0]
        if case.event == "a reader comes":
            self.readers.enter_context(reading(self.root / name_of(case.other)))
        elif case.event in ("a rewind", "a tracker becomes illegible"):
            then = deletions.after(case)
            for name in (STATE, TRACKER) if case.event == "a rewind" else (TRACKER,):
                with contextlib.suppress(FileNotFoundError):
                    self._unlink(self.own / name)
            place.make([(f"{own}/{TRACKER}", deletions.trackers_of(then.trackers, then.named)[TRACKER], 0.0)])
        elif case.event == "saved anew" and deletions.may_be_saved(case, name_of(case.other)):
            save(self.root / name_of(case.other), [prepared(shards(0, 12))])
        elif case.event == "a leftover is renewed":
            for name in place.seen():
                if deletions.is_leftover(case, name):
                    place.touch(name)

    def _unlink(self, path: Any) -> None:
        if isinstance(path, Path):
            path.unlink()
        else:
            path.fs.rm_file(path.path)

    def carry_out(self) -> None:
        """The deed."""
        case, root = self.case, self.root
        if case.path == "prune":
            plan = plan_pruning(root, case.keep)
            self.event()
            plan.carry_out()
        elif case.path == "repair":
            steps = plan_repair(root, force=False)
            self.event()
            steps.carry_out()
        elif case.path in ("retention", "removal thread"):
            self._in_background()
        elif case.path == "aborted conversion":
            with pytest.raises(KeyboardInterrupt):
                interrupted(root / case.target)
        else:
            save_to(case, root)
        assert removal.wait(LIMIT_S)

    def _in_background(self) -> None:
        """Behind a slow deletion."""
        case, slow = self.case, threading.Event()
        removal.later("a slow deletion", lambda: slow.wait(LIMIT_S))
        try:
            if case.path == "retention":
                prune_later(self.root, case.keep, case.also_keep)
            else:
                remove_later(self.root / case.target)
            self.event()
        finally:  # whatever a wrong rule raises: else this and the next case wait for the limit
            slow.set()


def outcome(case: Case, place: Place, whole: dict[str, dict[str, Files]]) -> str:
    """Carry a case out; what is wrong in the end raises."""
    place.make(deletions.made(case, whole["rename" if case.is_local else "marker"]))
    before = place.seen()
    expected = deletions.left(case, before)
    refused = False
    with contextlib.ExitStack() as readers:
        try:
            running = Running(case, place, readers)
            with running.at_the_last_moment() if case.late else contextlib.nullcontext():
                running.carry_out()
        except NotACheckpointError:
            assert "illegible" in (case.trackers, deletions.after(case).trackers)
            refused = True
    found = place.seen()
    anew = tuple(f"{directory}/" for directory in expected.anew)
    new = {path for path in found if path.startswith(anew)} if anew else set()
    wrong = {path for path in found if path not in expected.files and path not in new}
    gone = {path for path in expected.files if path not in found}
    changed = {path for path in {*found} & {*expected.files} if found[path] != expected.files[path]}
    if wrong or gone or changed:
        raise AssertionError(f"against the rules there: {wrong}, gone: {gone}, changed: {changed}")
    for directory in anew:
        assert f"{directory}manifest.json" in found
    if refused:
        return "refused: a tracker is illegible"
    return "something was deleted" if set(before) - set(found) else "nothing was deleted"


def place_in(store: str, folder: Path) -> Place:
    return Disk(folder) if store == STORES[0] else Memory() if store == STORES[1] else S3()


def wrong_in(cases: list[tuple[str, str, str, int]], whole: dict[str, dict[str, Files]], folder: Path) -> list[str]:
    """What is wrong in the end, a case each; how the others ended is kept."""
    begin, outcomes, wrong = time.monotonic(), [], []
    for number, (store, path, event, n) in enumerate(cases):
        case = deletions.drawn(store, path, event, f"{SEED} {n}")
        place = place_in(store, folder / str(number))
        try:
            how = outcome(case, place, whole)
        except (AssertionError, CheckpointError, OSError) as error:
            wrong.append(f"{case}: {type(error).__name__}: {error}")
        else:
            outcomes.append((f"{path}, {store}", how))
        place.clear()
    ENDED.extend(outcomes)
    SECONDS.append(time.monotonic() - begin)
    return wrong


ENDED: list[tuple[str, str]] = []
SECONDS: list[float] = []


def test_nothing_is_removed_that_no_rule_names(whole: dict[str, dict[str, Files]], tmp_path: Path) -> None:
    wrong = wrong_in(sample(*STORES[:2]), whole, tmp_path)
    assert not wrong, "\n".join((*wrong[:5], f"{len(wrong)} such; {sampling.how_to_repeat()}"))


def test_nothing_is_removed_in_s3_that_no_rule_names(
    whole: dict[str, dict[str, Files]], tmp_path: Path, environment: dict[str, str]
) -> None:
    wrong = wrong_in(sample(STORES[2]), whole, tmp_path)
    assert not wrong, "\n".join((*wrong[:5], f"{len(wrong)} such; {sampling.how_to_repeat()}"))
    sampling.record("deletions", sampling.Result(sum(SECONDS), sampling.tally(ENDED)))


LEFT_OUT: dict[str, tuple[str, str, Callable[..., object], Case]] = {
    "links": ("prune", "_link_to", lambda *_: "", Case("", "", "", special=frozenset({("link into it", 1)}))),
    "leases": ("retention", "_is_read", lambda *_: False, Case("", "", "", special=frozenset({("reader", 1)}))),
    "trackers": ("removal thread", "named_by", lambda *_: "", Case("", "", "", trackers="Bridge's", named=(1, 1))),
    "what counts": ("retention", "_can_be_read", lambda *_: True, Case("", "", "", kinds={1: "ours", 2: "damaged"})),
}
"""A rule of `retention`: who deletes, where the rule is, what would take its place, and what then goes against it."""


@pytest.mark.parametrize("rule", LEFT_OUT)
def test_a_rule_that_is_left_out_is_missed(
    rule: str, whole: dict[str, dict[str, Files]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, name, nothing, case = LEFT_OUT[rule]
    kinds = case.kinds or dict.fromkeys((1, 2), "ours")
    case = replace(case, store=STORES[0], path=path, event="nothing", kinds=kinds, target=name_of(1))
    outcome(case, Disk(tmp_path / "as it is"), whole)
    monkeypatch.setattr(retention, name, nothing)
    with pytest.raises(AssertionError, match=r"gone: .'run"):
        outcome(case, Disk(tmp_path / "left out"), whole)
