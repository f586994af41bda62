# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What CPU ranks cannot show: NCCL, CUDA's kernels, pinned memory, streams, FP8, by the check of docs/gpu.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from testing.gpu.__main__ import CPU_BYTES, SECTIONS
from testing.gpu.resume import CASES
from testing.modules import is_installed
from tests.soak import sampling

REPOSITORY = Path(__file__).parents[2]
CHECK = [sys.executable, "-P", "-m", "testing.gpu"]


def ended(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(REPOSITORY), **environment}
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=580, check=False
    )


def reported(folder: Path, *options: str) -> Any:
    """What the check found; the file has what it printed, and its exit status says the same."""
    out = folder / "report.json"
    done = ended([*CHECK, *options, "--disk", str(folder), "--out", str(out)])
    assert out.exists(), done.stderr
    report = json.loads(out.read_text())
    assert json.loads(done.stdout) == report
    assert done.returncode == (0 if report["passed"] else 1)
    return report | {"said": done.stderr}


@pytest.fixture(scope="module")
def gpu_report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of the check on all GPUs, a rank each."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch.cuda.is_available() is False on this machine")
    return reported(tmp_path_factory.mktemp("gpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_training_resumes_bit_for_bit(case: str, gpu_report: Any) -> None:
    if case in gpu_report["not_run"]:
        pytest.skip(gpu_report["not_run"][case])
    assert [reason for reason in gpu_report["reasons"] if reason.startswith(case)] == [], gpu_report["said"]
    assert gpu_report["resume"][case]["losses"]


@pytest.mark.gpu
def test_the_whole_check_passes(gpu_report: Any) -> None:
    assert gpu_report["passed"], gpu_report["reasons"]


def check_cpu_report(report: Any) -> None:
    """All that CPU ranks can do was done, and nothing else is claimed."""
    assert report["passed"], (report["reasons"], report.get("said"))
    engine = {name for name, case in CASES.items() if case.engine}
    can = set(CASES) - {"FP8, delayed scaling"} - (set() if is_installed("transformer_engine") else engine)
    assert set(report["resume"]) == can
    assert {name for name, found in report["resume"].items() if found["host_copies"]} == {
        name for name in can if CASES[name].recipe.offload
    }
    assert all(found["tensors"] > 10 for found in report["resume"].values())
    assert {name for name in report["not_run"] if name.startswith("copies of")} == {
        f"copies of {call}" for call in ("a save", "a load", "a step, offload 1.0, overlap")
    }
    assert set(report["not_run"]) == set(CASES) - can | {n for n in report["not_run"] if n.startswith("copies of")}
    assert report["overlap"]["compute_s"] > 0
    for place in ("memory", "disk"):
        for call in ("save", "load"):
            assert report["large"][place][call]["bytes"] >= CPU_BYTES
        parts = set(report["large"][place]["save"]["parts"])
        assert parts == {"device to host", "hashing", "writing"}, "only payload counts as read"
        assert {"reading", "hashing", "host to device"} == set(report["large"][place]["load"]["parts"])


def test_the_check_runs_on_cpu_ranks(tmp_path: Path) -> None:
    check_cpu_report(reported(tmp_path, "--cpu"))


def test_a_check_that_does_not_end_in_time_has_not_passed(tmp_path: Path) -> None:
    report = reported(tmp_path, "--cpu", "--ranks", "1", "--time-limit", "40.1")
    assert not report["passed"]
    assert report["reasons"] == ["rank 0 was not through after 0 s"]
    assert set(report["not_run"]) == set(SECTIONS)


@pytest.mark.skipif(not sampling.FULL, reason="in make test-all: it builds wheels")
def test_a_bundle_brings_all_that_the_check_needs(tmp_path: Path) -> None:
    made = ended(["make", "--no-print-directory", "--directory", str(REPOSITORY), "gpu-bundle"])
    assert made.returncode == 0, made.stderr
    command = [str(REPOSITORY / "tools/gpu_check.sh"), str(REPOSITORY / "out/gpu-bundle"), "--cpu"]
    done = ended(command, PYTHON=sys.executable)
    report = json.loads(done.stdout)
    check_cpu_report(report)
    assert report["commit"] == (REPOSITORY / "out/gpu-bundle/commit").read_text().strip()
