# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Signals, stops and forks at each step of a background save: what is under way or comes next is whole."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.io.progress import Unwatched
from mbridge_fsdp_ckpt.tools.verify import verify
from testing.modules import is_installed
from tests.soak import sampling, signals
from tests.soak.signals import Row, Seen

REPOSITORY = Path(__file__).parents[2]
TOGETHER = 12  # rows of one job
LIMIT_S = 60.0  # for a row

SHARE = 60  # one in so many rows runs by default

pytestmark = pytest.mark.skipif(not is_installed("megatron.core"), reason="needs megatron.core")


def drawn() -> list[Row]:
    """Those that run now: MBRIDGE_SIGNALS, a part of their names, picks some."""
    if (wanted := os.environ.get("MBRIDGE_SIGNALS")) is not None:
        return [row for row in signals.rows() if wanted in row.name]
    return sampling.drawn("signals", signals.rows(), SHARE)


@pytest.mark.timeout(7200)
def test_saves_outlive_what_happens(tmp_path: Path) -> None:
    begin, rows, outcomes, wrong = time.monotonic(), drawn(), [], []
    for start in range(0, len(rows), TOGETHER):
        together, root = rows[start : start + TOGETHER], tmp_path / str(start)
        root.mkdir()
        for row, ranks in zip(together, run(together, root), strict=True):
            if trouble := decide(row, ranks):
                wrong.append(f"{row.name}: {trouble}")
            outcomes.append((f"{row.how}, {row.where}", outcome(ranks)))
    assert not wrong, "\n".join([*wrong, sampling.how_to_repeat()])
    found = sampling.tally(outcomes)
    print(f"signals: {found}; {sampling.how_to_repeat()}")
    if "MBRIDGE_SIGNALS" not in os.environ:
        sampling.record("signals", sampling.Result(time.monotonic() - begin, found, {"time limit, s": signals.LIMIT_S}))


def outcome(ranks: list[Seen]) -> str:
    """Which saves are whole, and what was raised."""
    whole = [name for name, target in zip(("that one", "the next"), ranks[0].targets, strict=True) if is_whole(target)]
    raised = ", ".join(sorted({f"`{error}`" for seen in ranks for error in seen.errors}))
    return f"whole: {' and '.join(whole) or 'none'}{f' ({raised})' if raised else ''}"


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


def decide(row: Row, ranks: list[Seen]) -> str:
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
