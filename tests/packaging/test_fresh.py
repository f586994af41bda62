# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A fresh environment: a stack as its own packages declare it, then our wheel by pip; and what the extras ask for.

Nothing is overridden here, as it is in the environments of the other tests, so that pip's judgement counts.
"""

from __future__ import annotations

import json
import platform
import venv
from pathlib import Path

import pytest

from tests import compatibility
from tests.packaging.conftest import REPOSITORY, run
from tests.packaging.test_install import OURS
from tests.soak import sampling

pytestmark = pytest.mark.skipif(not sampling.FULL, reason="in make test-all: it installs from the registry")

# Of a later glibc than this machine may have: nothing of it is imported here.
PLATFORM = ("--python-platform", f"{platform.machine()}-manylinux_2_40")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stack", ["verl", "current"])
def test_our_wheel_changes_nothing_that_was_there(stack: str, wheel: Path, tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    venv.create(tmp_path, with_pip=True)
    run("uv", "pip", "install", "--quiet", "--python", python, *PLATFORM, *of(stack), limit=1200)
    before = listed(python)
    assert "No broken requirements" in run(python, "-m", "pip", "check")
    run(python, "-m", "pip", "install", "--quiet", wheel)
    after = listed(python)
    assert after[OURS]
    assert {name: after.get(name) for name in before} == before
    assert "No broken requirements" in run(python, "-m", "pip", "check")


def of(stack: str) -> list[str]:
    """Its pins.  Bridge 0.6 requires what cannot be built without CUDA: it is left out, and VeRL stands beside it."""
    pins = dict(zip(compatibility.PINNED, compatibility.pins_of(stack), strict=True))
    engine = f"transformer-engine[core_cu13]=={pins.pop('transformer-engine')}"
    if stack == "current":
        del pins["megatron-bridge"]
    return [engine, *(f"{package}=={version}" for package, version in pins.items())]


def listed(python: Path) -> dict[str, str]:
    """Packages and their versions."""
    found = json.loads(run(python, "-m", "pip", "list", "--format", "json"))
    return {one["name"]: one["version"] for one in found}


@pytest.mark.parametrize("extra", ["bridge", "verl"])
def test_an_extra_can_be_resolved(extra: str) -> None:
    found = run("uv", "pip", "compile", "--quiet", *PLATFORM, "--extra", extra, REPOSITORY / "pyproject.toml")
    assert f"\nmegatron-{extra}==" in found or f"\n{extra}==" in found
