# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""How a function travels by name."""

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testing.messages import FunctionName


def function() -> str:
    return "mine"


class Holder:
    @staticmethod
    def function() -> str:
        return "the class's"


@pytest.fixture
def modules() -> Iterator[None]:
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        del sys.modules[name]


def test_functions_and_static_methods_are_found_again() -> None:
    assert FunctionName.of(function) == FunctionName(__name__, __file__, "function")
    assert FunctionName.of(function).find() is function
    assert FunctionName.of(Holder.function).find()() == "the class's"


@pytest.mark.parametrize("unreachable", [lambda: None, functools.partial(function), "text".upper])
def test_what_no_module_holds_is_refused(unreachable: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="module-level function"):
        FunctionName.of(unreachable)


@pytest.mark.usefixtures("modules")
def test_a_module_that_no_path_leads_to_is_loaded_from_its_file(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "twins.py").write_text(f"def name():\n    return {folder!r}\n")
        assert FunctionName("twins", str(tmp_path / folder / "twins.py"), "name").find()() == folder


@pytest.mark.usefixtures("modules")
def test_a_module_with_a_broken_import_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "broken_module.py"
    file.write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        FunctionName("broken_module", str(file), "name").find()


def test_a_missing_function_is_named() -> None:
    with pytest.raises(ImportError, match="has no absent"):
        FunctionName(__name__, __file__, "absent").find()
