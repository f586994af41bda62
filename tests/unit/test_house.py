# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Rules of the house that import-linter cannot hold: sizes, and names that have one place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import mbridge_fsdp_ckpt
from tools import headers

PACKAGE = Path(mbridge_fsdp_ckpt.__file__).parent
REPOSITORY = Path(__file__).parents[2]
FILES = sorted(PACKAGE.rglob("*.py"))
FUNCTION_LINES, FILE_LINES = 40, 600

BRIDGES = (
    "run_config.yaml",
    "train_state.pt",
    "train_state",
    "custom_manager_class",
    "data_parallel_sharding_strategy",
)
"""Names of Megatron-Bridge's files, and of fields in them, that this package reads or writes."""

OF_BRIDGE = "integrations/bridge"
"""The folder that may say them."""

OF_ALL = PACKAGE / "format" / "names.py"
"""What every reader of progress needs, Megatron-LM's too, is said once, there."""


GONE = re.compile(
    r"(?<![a-z])(seats?|mates?|parcels?|sketch(es)?|verdicts?|outgoing|rehears\w*|agreements?|signs? of life"
    r"|beside the training|held[_ ]still|take[_ ]back|told|circles?|growing|holdings?)(?![a-z])",
    re.IGNORECASE,
)
"""Words that only this package used; docs/architecture.md has those of the field in their place."""
PAGES = sorted({REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")})


def functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Name and lines, docstring left out, of every function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            yield node.name, lines


def literals(tree: ast.AST) -> Iterator[str]:
    """Every string that is no docstring."""
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_the_rules_see_what_they_are_about() -> None:
    tree = ast.parse('def f():\n    """Says\n    nothing."""\n    return "train_state"\n')
    assert list(functions(tree)) == [("f", 2)]
    assert list(literals(tree)) == ["train_state"]
    assert len(FILES) > 100


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_file_and_no_function_is_too_long(file: Path) -> None:
    text = file.read_text()
    assert text.count("\n") <= FILE_LINES
    assert [found for found in functions(ast.parse(text)) if found[1] > FUNCTION_LINES] == []


def test_bridges_names_are_said_in_its_folder_alone() -> None:
    elsewhere = [file for file in FILES if not file.is_relative_to(PACKAGE / OF_BRIDGE) and file != OF_ALL]
    said = {
        (str(file.relative_to(PACKAGE)), literal)
        for file in elsewhere
        for literal in literals(ast.parse(file.read_text()))
        if literal in BRIDGES or any(name in literal for name in BRIDGES[:2])
    }
    assert said == set()
    bridge = {
        literal
        for file in (*(PACKAGE / OF_BRIDGE).glob("*.py"), OF_ALL)
        for literal in literals(ast.parse(file.read_text()))
    }
    assert bridge >= set(BRIDGES)


def test_private_words_are_gone_from_code_and_pages() -> None:
    assert [GONE.sub("", text) for text in ("a seat", "two_mates", "Verdict", "rehearsal", "taken", "estimate")] == [
        *("a ", "two_", "", ""),
        *("taken", "estimate"),
    ]
    found = {
        f"{file.relative_to(REPOSITORY)}: {match[0]}"
        for file in (*FILES, *PAGES)
        for match in GONE.finditer(file.read_text())
    }
    assert found == set()


def test_every_source_file_names_its_licence(tmp_path: Path) -> None:
    assert list(headers.without()) == [], "run: python -m tools.headers"
    script = tmp_path / "script.sh"
    script.write_text("#!/bin/sh\ntrue\n")
    headers.add(script)
    assert script.read_text() == f"#!/bin/sh\n{headers.HEADER}true\n"
