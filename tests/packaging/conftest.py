# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The wheel that `pip wheel` builds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SOURCES = ("mbridge_fsdp_ckpt", "pyproject.toml", "README.md", "LICENSE")


def run(*command: str | Path, limit: int = 300) -> str:
    """What a command prints; it must succeed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    arguments = list(map(str, command))
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False, timeout=limit)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="package")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves folders beside its sources."""
    place = tmp_path_factory.mktemp("wheel")
    copy = place / "sources"
    copy.mkdir()
    for name in SOURCES:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", place)
    run(sys.executable, "-m", "pip", "wheel", *options, copy)
    (built,) = place.glob("*.whl")
    return built
