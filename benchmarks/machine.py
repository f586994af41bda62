"""Where and with what a benchmark ran."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("mbridge-fsdp-ckpt", "torch", "megatron-core", "megatron-bridge", "transformer-engine")


def circumstances(scratch: Path, **more: str) -> dict[str, str]:
    """When a benchmark ran, what else is to be said of it, and on what."""
    return {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", **more, **machine(scratch), **versions()}


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


def versions() -> dict[str, str]:
    """Python, the packages, and this checkout's commit."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    import mbridge_fsdp_ckpt

    if found["mbridge-fsdp-ckpt"] == "not installed":  # run from a checkout
        found["mbridge-fsdp-ckpt"] = mbridge_fsdp_ckpt.__version__
    found["commit"] = _commit(Path(mbridge_fsdp_ckpt.__path__[0]))
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


def _commit(directory: Path) -> str:
    commit = _output(["git", "-C", str(directory), "rev-parse", "--short", "HEAD"])
    if not commit:
        return "not a checkout"
    changed = _output(["git", "-C", str(directory), "status", "--porcelain", "--", "."])
    return f"{commit} with changes" if changed else commit


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
