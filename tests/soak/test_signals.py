"""Signals, stops and forks at each step of a background save: what is under way or comes next is whole."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from mbridge_fsdp_ckpt.care.verify import verify
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.storage.progress import Unwatched
from mbridge_fsdp_ckpt.testing.modules import is_installed
from tests.soak import signals
from tests.soak.signals import Row, Seen

REPOSITORY = Path(__file__).parents[2]
TOGETHER = 12  # rows of one job
LIMIT_S = 60.0  # for a row

pytestmark = [
    pytest.mark.skipif(
        "MBRIDGE_SIGNALS" not in os.environ, reason="make test-signals runs it: signals end saves today"
    ),
    pytest.mark.skipif(not is_installed("megatron.core"), reason="needs megatron.core"),
]


def parts() -> list[list[Row]]:
    """Rows that share a job: MBRIDGE_SIGNALS, a part of their names, picks some."""
    wanted = [row for row in signals.rows() if os.environ.get("MBRIDGE_SIGNALS", "") in row.name]
    return [wanted[start : start + TOGETHER] for start in range(0, len(wanted), TOGETHER)]


@pytest.mark.timeout(3 * LIMIT_S * TOGETHER)
@pytest.mark.parametrize("rows", parts(), ids=lambda rows: rows[0].name)
def test_saves_outlive_what_happens(rows: list[Row], tmp_path: Path) -> None:
    seen = run(rows, tmp_path)
    wrong = {row.name: trouble for row, ranks in zip(rows, seen, strict=True) if (trouble := judge(row, ranks))}
    assert not wrong, "\n".join(f"{name}: {trouble}" for name, trouble in wrong.items())


def run(rows: list[Row], root: Path) -> list[list[Seen]]:
    """What each rank saw of each row; nothing of those that a job did not come to."""
    (root / "run").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [_started(rank, port, rows, root) for rank in range(2)]
    try:
        for rank in ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.wait(LIMIT_S * (1 + len(rows)))
    finally:
        for process in [child for rank in ranks for child in [*signals.descendants(rank.pid), rank.pid]]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for rank in ranks:
            rank.wait()
    lines = [(root / f"rank{number}.out").read_text().splitlines() for number in range(2)]
    seen = [[Seen(**json.loads(line)) for line in own if line.startswith("{")] for own in lines]
    return [[own[number] for own in seen if number < len(own)] for number in range(len(rows))]


def _started(rank: int, port: int, rows: list[Row], root: Path) -> subprocess.Popen[bytes]:
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with (root / f"rank{rank}.out").open("wb") as out, (root / f"rank{rank}.err").open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.soak.signals", str(root), *(row.name for row in rows)],
            env={**os.environ, **place, "OMP_NUM_THREADS": "1"},
            cwd=REPOSITORY,
            stdout=out,
            stderr=errors,
            start_new_session=True,  # signals are the job's
        )


def judge(row: Row, ranks: list[Seen]) -> str:
    """What is wrong with what ranks saw; empty where nothing is."""
    if len(ranks) < 2:
        return "the job did not come through it"
    if not ranks[0].hit:
        return "the step was never taken"
    under_way, following = map(is_whole, ranks[0].targets)
    errors = {tuple(seen.errors) for seen in ranks}
    told = f"saved {under_way}, then {following}; raised {sorted(errors)}; survived {[seen.survived for seen in ranks]}"
    if row.how == "twice":  # a named error is allowed, and that a process was given up
        return "" if following or under_way else told
    if row.how in signals.SIGNALS and not all(seen.handled for seen in ranks):
        return f"a trainer got no signal; {told}"
    good = under_way and following and errors == {()} and all(seen.survived for seen in ranks)
    return "" if good else told


def is_whole(directory: str) -> bool:
    """Whether there is a checkpoint without damage."""
    try:
        return not verify(Path(directory), header=False, workers=1, progress=Unwatched()).damage
    except CheckpointError:
        return False
