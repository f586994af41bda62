# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""docs/compatibility.md says what the tests prove now."""

import re

from mbridge_fsdp_ckpt.versions import TESTED
from tests import compatibility
from tests.convert import bridges


def test_the_tables_are_those_of_the_tests() -> None:
    page = compatibility.PAGE.read_text()
    assert compatibility.rewritten(page) == page, "run: python -m tests.compatibility"


def test_everybody_who_checks_versions_is_on_the_page() -> None:
    files = {str(file.relative_to(compatibility.PACKAGE)) for file in compatibility.PACKAGE.rglob("*.py")}
    assert {file for file in files if compatibility.required(compatibility.PACKAGE / file)} == set(
        compatibility.CALLERS
    )


def test_every_package_of_the_list_is_on_the_page_as_the_code_has_it() -> None:
    page = compatibility.PAGE.read_text().replace(">= ", ">=").replace("< ", "<").replace(", ", ",")
    for package, versions in TESTED.items():
        assert re.search(rf"^\| {package}[^|]*\| {re.escape(versions)} \|", page, re.MULTILINE), package


def test_every_family_loads_in_three_layouts_that_differ() -> None:
    layouts: dict[str, set[object]] = {}
    for proof in [*compatibility.family_proofs(), *compatibility.model_proofs()]:
        if not proof.skipped:
            assert proof.columns() is not None
            changed = set(proof.columns()) - {"ranks alone"}
            layouts.setdefault(proof.row, set()).update([proof.loaded_in] if changed else [])
    assert {row: len(found) for row, found in layouts.items() if len(found) < 3} == {}


def test_how_models_of_bridge_ended_is_known_for_the_pinned_versions() -> None:
    pinned = (compatibility.PINS / "current" / "lock.txt").read_text().splitlines()
    versions, endings = bridges.recorded()
    assert {f"{package}=={number}" for package, number in versions.items()} <= set(pinned)
    assert not [name for name, ending in endings.items() if ending.kind == "here"]
