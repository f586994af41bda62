# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What machine this is, and what is installed on it."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mbridge_fsdp_ckpt

_OURS = "mbridge-fsdp-ckpt"
_PACKAGES = (_OURS, "torch", "megatron-core", "megatron-bridge", "transformer-engine")
_ANSWER_LIMIT_S = 30


def machine(scratch: Path) -> dict[str, str]:
    """The hardware, as far as Linux tells, and how busy it is right now."""
    return {
        "processor": _field(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        "cores": str(os.cpu_count()),
        "memory": _field(Path("/proc/meminfo"), "MemTotal"),
        "system": f"{platform.system()} {platform.release()}",
        "file system of the checkpoints": _file_system(scratch),
        "load average before": " ".join(f"{load:.2f}" for load in os.getloadavg()),
    }


def gpus() -> list[str]:
    """Name, memory and driver of every GPU, as the driver's own tool has them."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return output(query).splitlines()


def versions(packages: Iterable[str] = _PACKAGES) -> dict[str, str]:
    """Python and the packages."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    if found.get(_OURS) == "not installed":  # run from a checkout
        found[_OURS] = mbridge_fsdp_ckpt.__version__
    return found


def output(command: list[str]) -> str:
    """What a command prints; nothing where there is no such command, or it fails."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_ANSWER_LIMIT_S)
    except (OSError, subprocess.SubprocessError):
        return ""
    return ended.stdout.strip()


def _field(path: Path, name: str) -> str:
    if path.is_file():
        for line in path.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""


def _file_system(directory: Path) -> str:
    answer = output(["findmnt", "--noheadings", "--output", "FSTYPE", "--target", str(directory)])
    return answer or "unknown"
