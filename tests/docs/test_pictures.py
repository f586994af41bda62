"""The committed pictures are what the script draws, and the first pages begin with them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import pictures

REPOSITORY = Path(__file__).parents[2]


def test_the_pictures_are_those_of_the_script() -> None:
    committed = {path.name: path.read_bytes() for path in pictures.FOLDER.glob("*.svg")}
    drawn = {name: draw().svg() for name, draw in pictures.PICTURES.items()}
    assert committed == drawn, "run: python -m tools.pictures"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_a_first_page_shows_a_save_and_the_plot_before_any_prose(page: str) -> None:
    title, *lines = [line for line in (REPOSITORY / page).read_text().splitlines() if line]
    assert title.startswith("# ")
    shown = [re.fullmatch(r"!\[[^]]+\]\((?:docs/)?pictures/(\w+)\.svg\)", line) for line in lines[:2]]
    assert [found and found[1] for found in shown] == ["save", "stock"]
