# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The progress bar: on a real pseudo-terminal, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPT = """
import sys, time
from mbridge_fsdp_ckpt.io import progress_bar
progress_bar.PATIENCE = float(sys.argv[2])
with progress_bar.job_bar(int(sys.argv[1]), wanted=sys.argv[3] == "wanted") as progress:
    for what in ("saving \\x1b[2Jall", "filling"):
        progress.begin(what, 4_000_000)
        for _ in range(4):
            time.sleep(0.15)
            progress.advance(1_000_000)
print("done")
"""


def written(
    kind: str,
    rank: int = 0,
    patience: float = 0.1,
    wanted: str = "wanted",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """What the script writes to its standard error."""
    ours, theirs = os.openpty() if kind == "terminal" else os.pipe()
    command = [sys.executable, "-c", SCRIPT, str(rank), str(patience), wanted]
    settings = {"PATH": "", "PYTHONPATH": str(REPOSITORY), "TERM": "xterm", "COLUMNS": "120", **environment}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=settings, text=True)
    os.close(theirs)
    found = b""
    try:
        while block := os.read(ours, 4096):
            found += block
    except OSError:  # how a pseudo-terminal ends
        pass
    os.close(ours)
    assert process.communicate()[0] == "done\n"
    assert process.returncode == 0
    return found.decode()


def test_a_terminal_shows_it() -> None:
    seen = written("terminal")
    assert "filling" in seen
    assert "4.0/4.0 MB" in seen
    assert "saving \\x1b[2Jall" in seen, "what is shown gives no orders"


@pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1"}, {"TTY_COMPATIBLE": "1"}], ids=str)
def test_a_pipe_gets_nothing(environment: dict[str, str]) -> None:
    assert written("pipe", environment=environment) == ""


def test_what_is_over_soon_shows_nothing() -> None:
    assert written("terminal", patience=60.0) == ""


def test_other_ranks_show_nothing() -> None:
    assert written("terminal", rank=1) == ""


def test_who_does_not_want_it_sees_nothing() -> None:
    assert written("terminal", wanted="no") == ""
    assert written("terminal", environment={"MBRIDGE_FSDP_CKPT_PROGRESS": "0"}) == ""
    assert "filling" in written("terminal", environment={"MBRIDGE_FSDP_CKPT_PROGRESS": "1"})
