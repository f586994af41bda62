# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The command: starts the ranks, waits for them no longer than it may, and says what was found, as JSON."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from testing import machine
from testing.gpu.job import Options

SECTIONS = ("resume", "large", "overlap", "copies")
GPU_BYTES, CPU_BYTES = 20_000_000_000, 4_000_000
LIMIT_S, GRACE_S = 450.0, 20.0
_TAIL = 60  # lines of a rank's log
_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # runs must repeat bit for bit
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "MASTER_ADDR": "127.0.0.1",
}


def main(words: list[str] | None = None) -> int:
    """Check this machine; 0 where every comparison held."""
    given = _arguments(words)
    report = _about(given)
    begin = time.monotonic()
    found, why = _run(given) if given.ranks else ({}, "torch.cuda.is_available() is False; --cpu runs on CPU ranks")
    report |= decided(found, why)
    report["seconds"] = round(time.monotonic() - begin, 1)
    text = json.dumps(report, indent=1)
    if given.out:
        given.out.write_text(f"{text}\n")
    print(text)
    return 0 if report["passed"] else 1


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check", description="Check saves and loads on this machine's GPUs.")
    parser.add_argument("--cpu", action="store_true", help="run on CPU ranks over gloo, with a stand-in for CUDA")
    parser.add_argument("--ranks", type=int, help="processes (default: one a GPU; with --cpu 2)")
    parser.add_argument("--bytes", type=int, help="state of the large save (default: 20e9; with --cpu 4e6)")
    parser.add_argument(
        "--disk", type=_folder, default=tempfile.gettempdir(), help="a folder of a local disk (default: %(default)s)"
    )
    parser.add_argument("--memory", type=_folder, default="/dev/shm", help="a folder in memory (default: %(default)s)")
    parser.add_argument("--time-limit", type=float, default=LIMIT_S, help="seconds in all (default: 450)")
    parser.add_argument("--commit", default="unknown", help="what was installed, for the report")
    parser.add_argument("--out", type=Path, help="a file that gets the report, too")
    given = parser.parse_args(words)
    given.ranks = given.ranks or (2 if given.cpu else torch.cuda.device_count() if torch.cuda.is_available() else 0)
    given.bytes = given.bytes or (CPU_BYTES if given.cpu else GPU_BYTES)
    return given


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no folder")
    return Path(text)


def _about(given: argparse.Namespace) -> dict[str, Any]:
    """What is known before anything ran."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    return {
        "passed": False,
        "reasons": [],
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "commit": given.commit,
        "ranks": given.ranks,
        "device": "CPU ranks over gloo, CUDA stood in for" if given.cpu else "GPU",
        "hardware": {**machine.machine(given.disk), "GPUs": machine.gpus()},
        "versions": {**machine.versions(), "cuda": torch.version.cuda, "nccl": nccl},
    }


def _run(given: argparse.Namespace) -> tuple[dict[str, Any], str | None]:
    """Run the ranks; what rank 0 wrote, and why they did not all end well.  Standard error gets what they said then."""
    with (
        tempfile.TemporaryDirectory(dir=given.disk) as disk,
        tempfile.TemporaryDirectory(dir=given.memory) as memory,
    ):
        path, logs = Path(disk) / "found.json", [Path(disk) / f"rank{rank}.log" for rank in range(given.ranks)]
        options = Options(given.cpu, given.bytes, disk, memory, given.time_limit - 2 * GRACE_S, str(path))
        codes = _codes(options, logs)
        found = json.loads(path.read_text()) if path.exists() else {}
        said = [log.read_text(errors="replace").splitlines() or ["nothing"] for log in logs]
        why = _why(codes, said, options.limit)
        if why or found.get("failures"):
            for rank, lines in enumerate(said):
                print(f"rank {rank} said:", *lines[-_TAIL:], sep="\n", file=sys.stderr)
        return found, why


def _codes(options: Options, logs: list[Path]) -> list[int | None]:
    """Run a rank for each log, until all have ended, one failed or time is up.  None of them outlives this call."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            processes.append(_start(options, rank, len(logs), store.port, log))
        deadline = time.monotonic() + options.limit + GRACE_S
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.poll() for process in processes):
                break
            time.sleep(0.1)
        return [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(GRACE_S)


def _why(codes: list[int | None], said: list[list[str]], limit: float) -> str | None:
    """Why the ranks did not all end well: the first that failed, rather than one that was still running then."""
    failed = sorted((rank for rank, code in enumerate(codes) if code != 0), key=lambda rank: codes[rank] is None)
    if not failed:
        return None
    rank = failed[0]
    if codes[rank] is None or any(line.startswith("Timeout (") for line in said[rank]):  # faulthandler says so
        return f"rank {rank} was not through after {limit:.0f} s"
    return f"rank {rank} ended with exit status {codes[rank]}: {said[rank][-1]}"


def _start(options: Options, rank: int, ranks: int, port: int, log: Path) -> subprocess.Popen[bytes]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    environment = {**os.environ, **_ENVIRONMENT, **{name: str(value) for name, value in place.items()}}
    # -P: what is installed is checked, not what lies in the folder this was started from
    command = [sys.executable, "-P", "-m", "testing.gpu.rank", options.text()]
    with log.open("wb") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)


def decided(found: Mapping[str, Any], why: str | None) -> dict[str, Any]:
    """The decision, and what there is of the figures.

    Args:
        found: What rank 0 wrote, as far as it came.
        why: Why the ranks did not all end well.
    """
    sections = found.get("sections", {})
    missing = [name for name in SECTIONS if name not in sections]
    reasons = [*found.get("failures", []), *([why] if why else [])]
    if missing and not why:
        reasons.append(f"no results of {', '.join(missing)}")
    not_run = {**found.get("not_run", {}), **dict.fromkeys(missing, "the check ended before")}
    took = found.get("section_seconds", {})
    return {"passed": not reasons, "reasons": reasons, "not_run": not_run, "section_seconds": took, **sections}


if __name__ == "__main__":
    sys.exit(main())
