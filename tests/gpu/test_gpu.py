"""What CPU ranks cannot show: NCCL, Transformer Engine's kernels, pinned memory, streams, FP8 (docs/gpu.md)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mbridge_fsdp_ckpt.testing.modules import is_installed

CASES = Path(__file__).parent / "cases.py"
needs_engine = pytest.mark.skipif(not is_installed("transformer_engine"), reason="needs Transformer Engine")


@pytest.fixture
def gpus() -> int:
    """How many there are."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch.cuda.is_available() is False on this machine")
    return torch.cuda.device_count()


def outcome(case: str, ranks: int, folder: Path, *options: str) -> Any:
    """What the case found, on that many ranks."""
    results = folder / "results.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    ended = subprocess.run(
        [*torchrun, str(CASES), case, str(folder / "checkpoint"), str(results), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-6000:]
    return json.loads(results.read_text())


def check_resumed(found: Any) -> None:
    """The run that loaded is the run that went on."""
    assert found["live"][0] == found["live"][1]
    assert found["losses"][0] == found["losses"][1]
    assert found["end"][0] == found["end"][1]
    assert found["live"][0] != found["end"][0], "the steps changed something"


@needs_engine
@pytest.mark.gpu
def test_training_resumes_bit_for_bit(gpus: int, tmp_path: Path) -> None:
    check_resumed(outcome("training", gpus, tmp_path))


@needs_engine
@pytest.mark.gpu
def test_an_offloaded_optimizer_resumes_bit_for_bit(gpus: int, tmp_path: Path) -> None:
    found = outcome("offloaded", gpus, tmp_path)
    check_resumed(found)
    assert found["pinned"]
    assert all(found["pinned"])


@needs_engine
@pytest.mark.gpu
def test_fp8_scaling_state_comes_back(gpus: int, tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip(f"needs FP8, of compute capability 8.9: this GPU has {torch.cuda.get_device_capability()}")
    found = outcome("fp8", gpus, tmp_path)
    check_resumed(found)
    before, after = found["scaling"]
    assert before
    assert after == before


@needs_engine
def test_the_code_of_these_tests_runs_on_cpu_ranks(tmp_path: Path) -> None:
    found = outcome("offloaded", 2, tmp_path, "--cpu")
    check_resumed(found)
    assert found["pinned"], "there are host copies; whether they are pinned only a GPU can tell"
