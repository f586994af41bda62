# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The committed pictures are what the script draws, and the tables of figures what the results hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import figures
from tools import pictures

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
SHOWN = re.compile(r"!\[([^]]+)\]\([^)]*pictures/\w+\.svg\)")


def test_the_pictures_are_those_of_the_script() -> None:
    committed = {path.name: path.read_bytes() for path in pictures.FOLDER.glob("*.svg")}
    drawn = {name: draw().svg() for name, draw in pictures.PICTURES.items()}
    assert committed == drawn, "run: python -m tools.pictures"


def test_no_figure_stands_in_the_text_beside_a_picture() -> None:
    """It is read aloud in the picture's place, and would be a second source of what was measured."""
    texts = [text for page in PAGES for text in SHOWN.findall(page.read_text())]
    assert len(texts) >= 3
    assert [text for text in texts if re.search(r"\d[.,\d]", text)] == []


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_the_figures_of_a_page_are_those_of_the_results(page: Path) -> None:
    text = page.read_text()
    assert figures.MARKED.search(text)
    assert figures.rewritten(text) == text, "run: python -m benchmarks.figures"


def test_a_figure_that_the_results_have_not_is_an_error() -> None:
    assert figures.rewritten("<!-- figures: small -->\n| 9 |\n<!-- end -->").count("| 0.07 |") == 2
    for title, keys, column in (("none", ("load",), "s"), ("4 GB", ("none",), "s"), ("4 GB", ("load",), "none")):
        with pytest.raises(LookupError, match="none"):
            figures.cell("disk", title, keys, column)
