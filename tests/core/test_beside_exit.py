# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A job that ends in the middle of a save beside it lets that come to its end, however the job ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from mbridge_fsdp_ckpt.io.progress import Unwatched
from mbridge_fsdp_ckpt.tools.verify import verify
from testing.modules import is_installed
from tests.soak import sampling
from tests.soak.kill import iteration

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 120.0


@contextmanager
def job(root: Path, how: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks, of which the first serves the store, once both have begun the save."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ExitStack() as stack:
        ranks = []
        for rank in range(2):
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.core.beside_job", str(root), how],
                env={**os.environ, **place, "OMP_NUM_THREADS": "1"},
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            ranks.append(process)
        for process in ranks:
            assert process.stdout is not None
            assert "saving\n" in iter(process.stdout.readline, ""), process.communicate()[1][-3000:]
        yield ranks


def children(process_id: int) -> list[int]:
    """The processes that a process has started."""
    tasks = Path(f"/proc/{process_id}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


ENDS = [("raises", 1), ("waits", -signal.SIGINT), ("leaves", 0), ("saves", 0)]


@pytest.mark.parametrize(("how", "code"), sampling.drawn("ends of a trainer", ENDS, share=2))
def test_the_save_is_complete(how: str, code: int, tmp_path: Path) -> None:
    if not is_installed("megatron.core"):
        pytest.skip("needs megatron.core, which is not installed")
    with job(tmp_path, how) as ranks:
        writers = [child for rank in ranks for child in children(rank.pid)]
        assert len(writers) == 2
        if how == "waits":
            for rank in ranks:
                rank.send_signal(signal.SIGINT)
        if how == "saves":  # as a scheduler does, to all processes of the step
            for process in [*writers, *(rank.pid for rank in ranks)]:
                os.kill(process, signal.SIGUSR1)
        time.sleep(1.0)
        assert [rank.poll() for rank in ranks] == [None, None], "they wait for their writers, which are stopped"
        for writer in writers:
            os.kill(writer, signal.SIGCONT)
        errors = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [code, code], errors
    assert not [error for error in errors if "Exception in thread" in error or "given up" in error]
    for number in (2, 3) if how == "saves" else (2,):
        assert verify(iteration(tmp_path, number), header=False, workers=1, progress=Unwatched()).damage == []
        assert (iteration(tmp_path, number) / "more").read_text() == "of the training process"
    assert (tmp_path / "latest").read_text() == ("3" if how == "saves" else "2")
    assert not any(Path(f"/proc/{writer}").exists() for writer in writers)
