# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Storage that is full, broken, read-only or slow: one clear error on all ranks, and the last checkpoint intact."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mbridge_fsdp_ckpt.commit.lease import STALE_S
from mbridge_fsdp_ckpt.settings import DEFAULT_STORAGE_LIMIT
from testing.modules import MEGATRON_MODULES
from testing.ranks import RankPool
from testing.templates import Templates
from tests.patience import patient_ranks
from tests.soak import disk, sampling
from tests.soak.disk import Fault, ToldBy

RANKS, LIMIT_S = 2, 20.0
EVERYBODY = (0, 1)
SHARE_BESIDE = 25  # of asynchronous saves one in so many runs by default: each starts writers
PACKAGE = "mbridge_fsdp_ckpt"

CALLS: tuple[tuple[str, tuple[int, ...], int], ...] = (
    ("pathlib:Path.mkdir", (0,), 2),
    ("pathlib:Path.open", EVERYBODY, 2),
    (f"{PACKAGE}.format.payload:PayloadWriter._append", EVERYBODY, 1),
    (f"{PACKAGE}.format.payload:PayloadWriter._append", EVERYBODY, 20),
    (f"{PACKAGE}.io.direct_writer:os.pwrite", EVERYBODY, 1),
    (f"{PACKAGE}.io.direct_writer:os.pwrite", EVERYBODY, 2),
    (f"{PACKAGE}.io.direct_writer:os.fsync", EVERYBODY, 1),
    (f"{PACKAGE}.io.direct_writer:os.fsync", EVERYBODY, 2),
    (f"{PACKAGE}.format.write_results:write_file", EVERYBODY, 1),
    (f"{PACKAGE}.format.write_results:write_file", (0,), 2),
    ("mbridge_fsdp_ckpt.dcp.writer:write_dcp_view", (0,), 1),
    (f"{PACKAGE}.dcp.writer:replace_file", (0,), 1),
    (f"{PACKAGE}.commit.rename:write_file", (0,), 1),
    (f"{PACKAGE}.commit.rename:sync_directory", (0,), 1),
    (f"{PACKAGE}.commit.rename:sync_directory", (0,), 2),
    (f"{PACKAGE}.commit.rename:_exchange", (0,), 1),
)
HOW: tuple[ToldBy | None, ...] = (None, "end")
"""A save that waits, or an asynchronous one, of which the end tells."""

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)


@pytest.fixture(scope="module")
def pool(templates: Templates) -> Iterator[RankPool]:
    yield from patient_ranks(templates, ("megatron.core",), MEGATRON_MODULES, RANKS)


@pytest.fixture(scope="module")
def old(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    root = tmp_path_factory.mktemp("old")
    return root, pool.run(disk.save_old, str(root / "iter_0000001"))[0]


def faults() -> list[tuple[Fault, bool]]:
    """Every call that can fail, with every error, on every rank that makes it, overwriting and fresh."""
    found = []
    for (call, ranks, number), error, overwrites in itertools.product(CALLS, ERRORS, (True, False)):
        if overwrites or not call.endswith("_exchange"):
            found += [(Fault(call, rank, error, number), overwrites) for rank in ranks]
    return found


def faults_beside() -> list[tuple[Fault, bool, ToldBy]]:
    """The same calls of writers, each with one of the errors in turn, and heard of at either of both places in turn."""
    errors = itertools.cycle(ERRORS)
    told_by: Iterator[ToldBy] = itertools.cycle(("next save", "end", "end"))
    found = [(fault, overwrites) for fault, overwrites in faults() if fault.error == ERRORS[0]]
    return [(replace(fault, error=next(errors)), overwrites, next(told_by)) for fault, overwrites in found]


def test_a_call_that_fails_is_one_error_everywhere(pool: RankPool, old: tuple[Path, Any], tmp_path: Path) -> None:
    cases = [(*case, None) for case in sampling.drawn("disk", faults())]
    run_all("disk", cases, "the same StorageError on all ranks", pool, old, tmp_path)


def test_a_call_of_a_writer_that_fails_is_one_error_everywhere(
    pool: RankPool, old: tuple[Path, Any], tmp_path: Path
) -> None:
    cases = sampling.drawn("disk beside", faults_beside(), SHARE_BESIDE)
    run_all("disk_beside", cases, "the same StorageError on all ranks, which trained on", pool, old, tmp_path)


def run_all(
    name: str,
    cases: Sequence[tuple[Fault, bool, ToldBy | None]],
    outcome: str,
    pool: RankPool,
    old: tuple[Path, Any],
    tmp_path: Path,
) -> None:
    """Each case in a copy of the old checkpoint's place; `None` for a save that waits."""
    begin, outcomes = time.monotonic(), []
    for number, (fault, overwrites, told_by) in enumerate(cases):
        root = tmp_path / str(number)
        shutil.copytree(old[0], root)
        seen = run_save(pool, root, fault, overwrites, told_by=told_by)
        how = f"{'overwriting' if overwrites else 'fresh'}, {told_by}"
        context = f"{fault}, {how}; {sampling.how_to_repeat()}"
        text = check_same_error(seen, "StorageError", context)
        assert os.strerror(fault.error or 0) in text, context
        assert (seen[0]["error"]["rank"], seen[0]["error"]["host"]) == (fault.rank, socket.gethostname()), context
        check_survival(pool, root, old[1], context)
        outcomes.append((errno.errorcode[fault.error or 0], outcome))
        shutil.rmtree(root)
    found = sampling.tally(outcomes)
    print(f"{name}: {found}; {sampling.how_to_repeat()}")
    sampling.record(name, sampling.Result(time.monotonic() - begin, found))


def run_save(
    pool: RankPool,
    root: Path,
    fault: Fault | None,
    overwrites: bool,
    limit: float = LIMIT_S,
    storage_limit: float = DEFAULT_STORAGE_LIMIT,
    told_by: ToldBy | None = None,
) -> Any:
    """What the ranks say of a save, or with `told_by` of an asynchronous one."""
    target = root / f"iter_000000{1 if overwrites else 2}"
    if told_by is None:
        return pool.run(disk.save_on, str(target), fault, limit, storage_limit)
    return pool.run(disk.save_beside_on, str(target), fault, limit, storage_limit, told_by)


def check_same_error(seen: list[dict[str, Any]], name: str, context: str = "") -> str:
    assert all(rank["error"] is not None for rank in seen), f"the save went through: {context}"
    assert {rank["error"]["name"] for rank in seen} == {name}, (seen, context)
    assert len({rank["error"]["text"] for rank in seen}) == 1, (seen, context)
    assert all(rank["unchanged"] for rank in seen), context
    return str(seen[0]["error"]["text"])


def check_survival(pool: RankPool, root: Path, state: Any, context: str = "") -> None:
    """The old checkpoint is whole, and the next save leaves nothing behind."""
    found = pool.run(disk.load_then_save, str(root / "iter_0000001"), str(root / "iter_0000003"))[0]
    assert found == state, context
    assert sorted(path.name for path in root.iterdir()) == ["iter_0000001", "iter_0000003"], context


def test_an_old_checkpoint_that_cannot_be_deleted_fails_no_save(
    pool: RankPool, old: tuple[Path, Any], tmp_path: Path
) -> None:
    root = Path(shutil.copytree(old[0], tmp_path / "root"))
    seen = run_save(pool, root, Fault(f"{PACKAGE}.commit.removal:shutil.rmtree", 0, errno.EIO), overwrites=True)
    assert [rank["error"] for rank in seen] == [None] * RANKS
    [old_one] = root.glob(".deleted-iter_0000001-*")
    os.utime(old_one, (time.time() - 2 * STALE_S,) * 2)
    pool.run(disk.load_then_save, str(root / "iter_0000001"), str(root / "iter_0000003"))
    assert sorted(path.name for path in root.iterdir()) == ["iter_0000001", "iter_0000003"]


def test_a_slow_disk_that_gets_on_fails_nobody(pool: RankPool, old: tuple[Path, Any], tmp_path: Path) -> None:
    """Every chunk is a heartbeat: the save takes longer than both limits.  Single slow calls: `test_slow`."""
    root, limit = Path(shutil.copytree(old[0], tmp_path / "root")), 3.0
    fault = Fault(f"{PACKAGE}.format.payload:PayloadWriter.add_pieces", 1, seconds=limit / 5)
    seen = run_save(pool, root, fault, overwrites=False, limit=limit, storage_limit=limit)
    assert [rank["error"] for rank in seen] == [None] * RANKS
    assert all(rank["unchanged"] for rank in seen)
    assert min(rank["seconds"] for rank in seen) > 2 * limit, "longer than either, and than one after the other"


@pytest.mark.parametrize("rank", sampling.drawn("stalls", EVERYBODY, share=2))
def test_a_disk_that_stalls_is_one_error_everywhere(
    rank: int, pool: RankPool, old: tuple[Path, Any], tmp_path: Path
) -> None:
    root = Path(shutil.copytree(old[0], tmp_path / "root"))
    grace = 16.0 if rank == 0 else 0.0  # how much longer others wait for rank 0, which is to decide
    fault = Fault(f"{PACKAGE}.format.payload:PayloadWriter.close", rank, seconds=5.0 + grace)
    seen = run_save(pool, root, fault, overwrites=True, limit=2.0, storage_limit=1.0)  # it stalls for longer than both
    text = check_same_error(seen, "RankMissingError")
    assert f"no sign of rank {rank} on {socket.gethostname()}" in text
    assert "'commit'" in text
    check_survival(pool, root, old[1])


@contextmanager
def mounted(place: Path, options: str) -> Iterator[None]:
    """A tmpfs; skips the test where this process may not mount."""
    place.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"mounting is not allowed here: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("told_by", sampling.drawn("full file systems", HOW, share=2))
def test_a_file_system_that_is_really_full(
    told_by: ToldBy | None, pool: RankPool, old: tuple[Path, Any], tmp_path: Path
) -> None:
    size = sum(path.stat().st_size for path in old[0].rglob("*") if path.is_file())
    with mounted(tmp_path / "small", f"size={size * 3 // 2}"):
        root = Path(shutil.copytree(old[0], tmp_path / "small" / "root"))
        text = check_same_error(run_save(pool, root, None, overwrites=True, told_by=told_by), "StorageError")
        assert os.strerror(errno.ENOSPC) in text
        found = pool.run(disk.load_then_save, str(root / "iter_0000001"), str(tmp_path / "elsewhere"))[0]
        assert found == old[1]
        assert [path.name for path in root.iterdir()] == ["iter_0000001"]


@pytest.mark.parametrize("told_by", sampling.drawn("read-only file systems", HOW, share=2))
def test_a_file_system_that_is_really_read_only(
    told_by: ToldBy | None, pool: RankPool, old: tuple[Path, Any], tmp_path: Path
) -> None:
    with mounted(tmp_path / "frozen", "size=64m"):
        root = Path(shutil.copytree(old[0], tmp_path / "frozen" / "root"))
        subprocess.run(["mount", "-o", "remount,ro", tmp_path / "frozen"], check=True)
        text = check_same_error(run_save(pool, root, None, overwrites=True, told_by=told_by), "StorageError")
        assert os.strerror(errno.EROFS) in text
        found = pool.run(disk.load_then_save, str(root / "iter_0000001"), str(tmp_path / "elsewhere"))[0]
        assert found == old[1]
