# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A forged checkpoint's text in every field that a tool prints: no terminal or browser obeys it.

The text would set a terminal's title, clear it, fill the clipboard, run backwards, forge a line, and open a link.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mbridge_fsdp_ckpt.io.progress_bar import progress_bar
from tests.soak import forge
from tests.unit import handmade
from tests.unit.test_cli import call, data

EVIL = "\x1b]0;t\x07\x1b[2J\x1b]52;c;aGk=\x07\x9b31m\u202e\r\nFORGED\n\u2028\x7f"
EVIL += "[red][link=evil]:bomb:$x_{$<img onerror=x>'\""
KEY = f"model.{EVIL}"


def evil_checkpoint(directory: Path, weight: float = 0.0) -> Path:
    """A checkpoint that can be read, whose every name is EVIL."""
    directory.parent.mkdir(exist_ok=True)
    handmade.make(directory)
    for name in ("listed", "beside"):
        (directory / f"{EVIL}.{name}").write_bytes(b"extra")
    handmade.edit(directory, 0, _renamed)
    handmade.edit(directory, 1, _renamed)
    forge.edit_manifest(lambda body: _rename_in(body, weight))(directory)
    return directory


def _renamed(part: handmade.Part) -> None:
    """Another name of a coordinate and of a key, wherever that comes by its hash; and all texts of its description."""
    part["header"]["axes"].append(EVIL)
    part["coordinates"][0].append(1)
    part["header"]["entries"][list(handmade.KEYS).index(handmade.WEIGHT)] |= {"family": EVIL, "component": EVIL}
    handmade.rename(part, handmade.WEIGHT, KEY)


def _rename_in(body: dict[str, Any], weight: float) -> None:
    body["families"] = {EVIL: KEY}
    body["slots"].append(EVIL)
    for values in body["hyperparameters"].values():
        values[EVIL] = f"{EVIL}{weight}"
    body["writer"] = {EVIL: EVIL}
    body["topology"] |= {EVIL: EVIL}
    body["values"] |= {EVIL: f"{EVIL}{weight}"}
    body["files"] = [{"name": f"{EVIL}.listed", "size": 5, "checksum": forge.checksum(b"extra")}]


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    return evil_checkpoint(tmp_path / "evil" / "iter_0000010")


def shown(*arguments: Any, code: int) -> str:
    """What the command prints to both streams."""
    result = call(*arguments, columns=4000)
    assert result.exit_code == code, result.output
    return result.stdout + result.stderr


def assert_shown_not_obeyed(text: str, times: int = 1) -> None:
    lines = text.split("\n")
    assert all(line.isprintable() for line in lines), [line for line in lines if not line.isprintable()]
    assert not any(line.lstrip().startswith("FORGED") for line in lines)
    assert text.count("\\x1b]0;t\\x07") >= times, text
    assert "[red][link=evil]:bomb:$x_{$<img onerror=x>" in text


def test_inspect(evil: Path) -> None:
    """Writer and its version, a topology's name and size, family; key and family of a listed key."""
    assert_shown_not_obeyed(shown("inspect", evil, "--key", "*", code=0), times=7)


def test_inspect_says_the_same_to_programs(evil: Path) -> None:
    found = data("inspect", evil, "--key", "*")
    assert found["writer"] == {EVIL: EVIL}
    assert KEY in found["matching"]
    assert call("inspect", evil, "--json").stdout.replace("\n", "").isprintable()


def test_families(evil: Path) -> None:
    assert_shown_not_obeyed(shown("families", evil, code=0), times=3)


def test_diff(evil: Path, tmp_path: Path) -> None:
    """A key on one side; values and hyperparameters that differ, by name and by what they are."""
    plain = handmade.make(tmp_path / "plain")
    assert_shown_not_obeyed(shown("diff", evil, plain, code=1), times=5)
    other = evil_checkpoint(tmp_path / "other", weight=1.0)
    assert_shown_not_obeyed(shown("diff", evil, other, code=1), times=6)
    place = list(handmade.KEYS).index(handmade.WEIGHT)
    for rank in handmade.HELD:
        handmade.edit(other, rank, lambda part: part["header"]["entries"][place].update(dtype="float16"))
    assert_shown_not_obeyed(shown("diff", evil, other, "--no-values", code=1))


def test_verify_names_damaged_files_and_keys(evil: Path) -> None:
    payload = evil / handmade.payload(0)
    content = payload.read_bytes()
    payload.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    (evil / f"{EVIL}.listed").unlink()
    assert_shown_not_obeyed(shown("verify", evil, code=1), times=2)


def test_an_error_names_a_key(evil: Path) -> None:
    handmade.edit_group(evil, lambda part: handmade.rows_of(part, KEY)[0].update(start=[9, 9]))
    assert_shown_not_obeyed(shown("inspect", evil, code=1))


def test_prune_and_repair_cite_a_tracker(evil: Path) -> None:
    (evil.parent / "latest_checkpointed_iteration.txt").write_text(
        "\x1b]0;t\x07[red][link=evil]:bomb:$x_{$<img onerror=x>"
    )
    for arguments in (("prune", evil.parent, "--keep", 1), ("inspect", evil.parent)):
        assert_shown_not_obeyed(shown(*arguments, code=1))
    assert_shown_not_obeyed(shown("repair", evil.parent, "--dry-run", code=0))


def test_names_of_directories(tmp_path: Path) -> None:
    directory = evil_checkpoint(tmp_path / EVIL)
    for arguments in (
        ("inspect", directory),
        ("verify", directory),
        ("repair", directory, "--stock-view", "--dry-run"),
    ):
        assert_shown_not_obeyed(shown(*arguments, code=0))
    assert_shown_not_obeyed(shown("inspect", tmp_path / f"no{EVIL}", code=1))
    (tmp_path / f".staging-{EVIL}-0123456789ab").mkdir()
    assert_shown_not_obeyed(shown("repair", tmp_path, "--force", "--dry-run", code=0))


@pytest.mark.parametrize("how", [("reshard", "--ranks", "1"), ("to-stock",)])
def test_convert(evil: Path, tmp_path: Path, how: tuple[str, ...]) -> None:
    """Notes name files that are carried over."""
    result = call("convert", *how, evil, tmp_path / f"to{EVIL}", columns=4000)
    assert result.exit_code == 0, result.output
    assert_shown_not_obeyed(result.stdout + result.stderr, times=2)


class Page(HTMLParser):
    """Tags, and text outside of tags; none has a handler of events."""

    KNOWN = frozenset(
        {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "code", "div", "span"}
        | {"table", "thead", "tbody", "tr", "th", "td", "svg", "rect", "text"}
    )

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not any(name.startswith("on") for name, _ in attrs), attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_of_the_shard_map_runs_nothing(evil: Path, tmp_path: Path) -> None:
    page = tmp_path / "map.html"
    assert call("inspect", evil, "--html", page, "--key", "*").exit_code == 0
    found = page.read_text()
    assert "<img" not in found
    assert re.sub(r"[^\S ]", "", found).isprintable()
    assert "img" not in Page(found).tags
    assert Page(found).text.count("<img onerror=x>") >= 6


def test_a_progress_bar_takes_no_orders(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "4000")
    with progress_bar() as bar:
        bar.begin(EVIL, 10)
        bar.advance(10)
    drawn = capsys.readouterr().err
    assert "\\x1b]0;t\\x07" in drawn
    assert "[red][link=evil]:bomb:" in drawn
    assert not re.search("\x1b\\]|\x1b\\[2J|\x07|\x9b|\u202e", drawn)


def test_a_colon_is_no_picture(tmp_path: Path) -> None:
    """A path may hold :100: without becoming another."""
    directory = handmade.make(tmp_path / "a:100:b")
    assert str(directory) in shown("inspect", directory, code=0)
    assert ":100:" in shown("inspect", tmp_path / "c:100:", code=1)
