# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Replaced attributes come back as they were."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from mbridge_fsdp_ckpt.patching import Patches, rebind_everywhere


def original() -> str:
    return "original"


def replacement() -> str:
    return "replacement"


class Base:
    @staticmethod
    def static() -> str:
        return "static"

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__

    def method(self) -> str:
        return "method"


class Derived(Base):
    """Inherits everything."""


@pytest.fixture
def modules() -> Iterator[tuple[ModuleType, ModuleType]]:
    """One that defines a function, one that imported it early under two names."""
    defining, importing = ModuleType("defining_module"), ModuleType("importing_module")
    vars(defining).update(function=original)
    vars(importing).update(function=original, alias=original, other="untouched")
    sys.modules |= {module.__name__: module for module in (defining, importing)}
    yield defining, importing
    for module in (defining, importing):
        del sys.modules[module.__name__]


def test_an_attribute_is_replaced_and_put_back() -> None:
    module, patches = ModuleType("some_module"), Patches()
    vars(module).update(name="before")
    patches.set(module, "name", "after")
    assert vars(module)["name"] == "after"
    patches.undo()
    assert vars(module)["name"] == "before"


def test_an_attribute_replaced_twice_returns_to_the_first() -> None:
    module, patches = ModuleType("some_module"), Patches()
    vars(module).update(name="before")
    for value in ("once", "twice"):
        patches.set(module, "name", value)
    patches.undo()
    assert vars(module)["name"] == "before"


def test_an_attribute_that_was_not_there_disappears_again() -> None:
    module, patches = ModuleType("some_module"), Patches()
    patches.set(module, "name", "after")
    patches.undo()
    assert "name" not in vars(module)


def test_undoing_again_leaves_later_changes_alone() -> None:
    module, patches = ModuleType("some_module"), Patches()
    vars(module).update(name="before")
    patches.set(module, "name", "after")
    patches.undo()
    vars(module).update(name="somebody else's")
    patches.undo()
    assert vars(module)["name"] == "somebody else's"


@pytest.mark.parametrize("name", ["static", "of_class", "method"])
@pytest.mark.parametrize("owner", [Base, Derived])
def test_a_class_is_afterwards_what_it_was(owner: type, name: str) -> None:
    before, patches = dict(vars(owner)), Patches()
    patches.set(owner, name, replacement)
    assert getattr(owner, name) is replacement
    patches.undo()
    assert dict(vars(owner)) == before
    assert Derived.static() == "static"
    assert Derived.of_class() == "Derived"
    assert Derived().method() == "method"


def test_every_name_of_a_function_is_rebound(modules: tuple[ModuleType, ModuleType]) -> None:
    defining, importing = modules
    patches = Patches()
    rebind_everywhere(patches, [(original, replacement)])
    assert vars(defining)["function"] is replacement
    assert vars(importing)["function"] is vars(importing)["alias"] is replacement
    assert vars(importing)["other"] == "untouched"
    patches.undo()
    assert vars(defining)["function"] is vars(importing)["function"] is vars(importing)["alias"]
    assert vars(defining)["function"]() == "original"


def test_what_is_no_module_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoNames:
        __slots__ = ()

    strangers: dict[str, Any] = {"stranger": NoNames(), "nothing": None}
    for name, stranger in strangers.items():
        monkeypatch.setitem(sys.modules, name, stranger)
    patches = Patches()
    rebind_everywhere(patches, [(replacement, original)])
    patches.undo()
    assert replacement() == "replacement"
