# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""An action follows a module's import, whoever imports it, and nothing else changes."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from mbridge_fsdp_ckpt.integrations.common.after_import import AfterImport

NAME = "package_of_a_test.late"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with a module that nobody has imported."""
    folder = tmp_path / "package_of_a_test"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield folder
    for name in [name for name in sys.modules if name.startswith("package_of_a_test")]:
        del sys.modules[name]


@pytest.fixture
def seen() -> list[ModuleType]:
    return []


@pytest.fixture
def hook(seen: list[ModuleType]) -> Iterator[AfterImport]:
    hook = AfterImport({NAME: seen.append})
    hook.install()
    yield hook
    hook.uninstall()


def test_it_acts_when_the_modules_code_has_run(package: Path, hook: AfterImport, seen: list[ModuleType]) -> None:
    assert NAME not in sys.modules
    module = importlib.import_module(NAME)
    assert seen == [module]
    assert module.value == 1
    importlib.import_module(NAME)
    assert seen == [module], "once"


def test_it_leaves_no_trace_in_the_module(package: Path, hook: AfterImport) -> None:
    spec = importlib.import_module(NAME).__spec__
    hook.uninstall()
    del sys.modules[NAME]
    plain = importlib.import_module(NAME).__spec__
    assert spec is not None
    assert plain is not None
    assert type(spec.loader) is type(plain.loader)
    assert spec.origin == plain.origin


def test_it_acts_at_once_on_a_module_that_is_there(package: Path, seen: list[ModuleType]) -> None:
    module = importlib.import_module(NAME)
    hook = AfterImport({NAME: seen.append})
    hook.install()
    hook.uninstall()
    assert seen == [module]


def test_uninstalled_it_does_nothing(package: Path, hook: AfterImport, seen: list[ModuleType]) -> None:
    before = [finder for finder in sys.meta_path if finder is not hook]
    hook.uninstall()
    hook.uninstall()
    assert sys.meta_path == before
    importlib.import_module(NAME)
    assert seen == []


def test_other_modules_and_missing_ones_are_as_ever(package: Path, hook: AfterImport, seen: list[ModuleType]) -> None:
    importlib.import_module("package_of_a_test")
    with pytest.raises(ModuleNotFoundError, match=r"package_of_a_test\.nothing"):
        importlib.import_module("package_of_a_test.nothing")
    (package / "late.py").unlink()
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError, match=r"package_of_a_test\.late"):
        importlib.import_module(NAME)
    assert seen == []


def test_a_module_that_fails_is_not_acted_upon(package: Path, hook: AfterImport, seen: list[ModuleType]) -> None:
    (package / "late.py").write_text("raise RuntimeError('broken')\n")
    with pytest.raises(RuntimeError, match="broken"):
        importlib.import_module(NAME)
    assert seen == []
    assert NAME not in sys.modules
