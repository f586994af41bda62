# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The committed API reference is what the docstrings say now, has every public name, and describes every argument."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt import families
from tools import reference

PAGE = reference.PAGE.read_text()
NAMED = set(re.findall(r"^(?:### |- \*\*|\| )`(\w+)`", PAGE, re.MULTILINE))
FUNCTIONS = {name: known for name, known in reference.homes().items() if inspect.isfunction(known)}


def test_the_page_is_made_from_the_docstrings_of_now() -> None:
    assert reference.page() == PAGE, "run: python -m tools.reference"


def test_every_public_name_is_there() -> None:
    raised = {kind.__name__ for kind in reference.named_errors()}
    assert len(raised) >= 20
    assert {*mbridge_fsdp_ckpt.__all__, *families.__all__, *raised} - NAMED == set()


@pytest.mark.parametrize("name", reference.MEMBERS)
def test_every_member_that_a_class_is_to_show_is_shown(name: str) -> None:
    shown = PAGE.partition(f"\n### `{name}`\n")[2].partition("\n### ")[0]
    found = {
        *re.findall(r"^- \*\*`(\w+)`", shown, re.MULTILINE),
        *re.findall(rf"^{name}\.(\w+)\(", shown, re.MULTILINE),
    }
    assert set(reference.MEMBERS[name].split()) - found == set()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_described(name: str) -> None:
    described = reference.Doc.of(FUNCTIONS[name].__doc__).fields
    assert list(described) == list(inspect.signature(FUNCTIONS[name]).parameters)
    assert [text for text in described.values() if text.startswith(("See ", "As in "))] == []


def test_a_docstring_is_taken_apart() -> None:
    def example(first: int, *, second: str = "") -> Any:
        """Do it.  Then again.

        Args:
            first: Bytes
                of it.
            second: See `example`.

        Returns:
            What came
            of it.

        Raises:
            ValueError, OSError: It
                failed.
        """

    doc = reference.Doc.of(example.__doc__)
    assert doc.text == "Do it. Then again."
    assert doc.entries == {
        "Args": {"first": "Bytes of it.", "second": "See `example`."},
        "Returns": {"": "What came of it."},
        "Raises": {"ValueError, OSError": "It failed."},
    }
    assert reference.signature("example", example) == "```python\nexample(first: int, *, second: str = '') -> Any\n```"
