"""When, where and with what the figures of a report came to be."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mbridge_fsdp_ckpt

_OURS = "mbridge-fsdp-ckpt"
_PACKAGES = (_OURS, "torch", "megatron-core", "megatron-bridge", "transformer-engine")
_CHECKOUT = Path(__file__).parents[1]


def circumstances(scratch: Path, **more: str) -> dict[str, str]:
    """When a benchmark ran, what else is to be said of it, and on what."""
    time = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    return {"date": time, **more, **machine(scratch), **versions(), "commit": commit("mbridge_fsdp_ckpt")}


def today() -> str:
    """The date, the same wherever it is asked for."""
    return f"{datetime.now(UTC):%Y-%m-%d}"


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


def _field(path: Path, name: str) -> str:
    if path.is_file():
        for line in path.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""


def _file_system(directory: Path) -> str:
    answer = _output(["findmnt", "--noheadings", "--output", "FSTYPE", "--target", str(directory)])
    return answer or "unknown"


def commit(*folders: str) -> str:
    """The commit that is checked out, and whether anything was changed since, in these folders or anywhere."""
    found = _output(["git", "-C", str(_CHECKOUT), "rev-parse", "HEAD"])
    if not found:
        return "not a checkout"
    changed = _output(["git", "-C", str(_CHECKOUT), "status", "--porcelain", "--", *(folders or ".")])
    return f"{found} with changes" if changed else found


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
