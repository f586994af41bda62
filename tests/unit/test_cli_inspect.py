# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`inspect`: numbers against what was written, and maps against the boxes."""

from __future__ import annotations

import re
import warnings
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from upath import UPath

from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.tools.balance import RankShare, balance
from mbridge_fsdp_ckpt.tools.drawing import elided
from mbridge_fsdp_ckpt.tools.shard_map import blocks as shard_map
from mbridge_fsdp_ckpt.tools.shard_map.blocks import ShardMap, colours, natural
from mbridge_fsdp_ckpt.tools.survey import Survey, survey, visit_chunks
from tests.unit import handmade
from tests.unit.handmade import BIAS, GROUP, WEIGHT
from tests.unit.test_cli import call, data, run
from tests.unit.test_cli_diff import build


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return handmade.make(tmp_path / "iter_0000010")


@pytest.fixture
def eight(tmp_path: Path) -> Path:
    """A hundred keys on eight ranks."""
    state = {f"model.layers.{n}.weight": torch.zeros(16, 4, dtype=torch.bfloat16) for n in range(100)}
    return build(tmp_path / "eight" / "iter_0000010", state, ranks=8)


def test_numbers_are_those_that_were_written(directory: Path) -> None:
    """Rank 0: 6 bf16, 6 fp32 and 1 fp32; rank 1: 6 bf16, 6 fp32 and 3 int64."""
    assert data("inspect", directory) == {
        "checkpoint": str(directory),
        "format": "fsdp_dtensor_safe",
        "version": [1, 0],
        "writer": {"mbridge-fsdp-ckpt": "0"},
        "topology": {"world": 2, "tensor": 2},
        "sections": {"model": {"keys": 2, "bytes": 48}, "optimizer": {"keys": 2, "bytes": 52}},
        "keys": 4,
        "families": {},
        "stock_view": False,
        "ranks": {"0": {"bytes": 40, "chunks": 3, "files": 1}, "1": {"bytes": 60, "chunks": 3, "files": 1}},
        "max_over_mean": 1.2,
        "written": [],
    }


def test_shown_it_fits_80_columns(directory: Path) -> None:
    shown = call("inspect", directory)
    assert (shown.exit_code, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    assert lines[0] == str(directory)
    assert all(len(line) <= 80 for line in lines[1:])
    rows = [line.split() for line in lines]
    assert ["format", "fsdp_dtensor_safe", "1.0"] in rows
    assert ["model", "2", "48", "bytes"] in rows
    assert ["1", "60", "bytes", "3", "1"] in rows
    assert "Mean 50 bytes a rank, max/mean 1.20." in lines


def test_piped_output_is_plain_and_whole(eight: Path) -> None:
    found = run("inspect", str(eight), "--key", "model.layers.1*")
    assert (found.returncode, found.stderr) == (0, "")
    assert "\x1b" not in found.stdout
    assert "…" not in found.stdout
    assert "  bfloat16 [16, 4]  128 bytes\n" in found.stdout
    assert "    rank 7: [14:16, 0:4]\n" in found.stdout


def test_keys_that_match_are_listed_with_their_blocks(directory: Path) -> None:
    assert data("inspect", directory, "--key", "model.*")["matching"] == {
        BIAS: {"dtype": "int64", "shape": [3], "bytes": 24, "family": None, "blocks": ["rank 1: [0:3]"]},
        WEIGHT: {
            "dtype": "bfloat16",
            "shape": [4, 3],
            "bytes": 24,
            "family": None,
            "blocks": ["rank 0: [0:2, 0:3]", "rank 1: [2:4, 0:3]"],
        },
    }
    assert "No key matches nothing.*." in call("inspect", directory, "--key", "nothing.*").stdout


def test_a_damaged_index_is_a_named_error(directory: Path) -> None:
    (directory / GROUP).write_bytes(b"{}")
    shown = call("inspect", directory)
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert shown.stderr.startswith("DamagedCheckpointError: ")


def test_stock_is_shown_as_far_as_it_tells(tmp_path: Path) -> None:
    state = {"model": {"weight": torch.arange(12.0).reshape(4, 3)}, "iteration": 10}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    found = data("inspect", tmp_path / "stock")
    assert (found["format"], found["version"], found["topology"]) == ("fsdp_dtensor", [], {})
    assert found["ranks"] == {"0": {"bytes": 48, "chunks": 1, "files": 1}}
    assert "stock records no others" in call("inspect", tmp_path / "stock").stdout


def test_an_object_store_is_inspected_as_well(directory: Path) -> None:
    place = UPath("memory://inspect/iter_0000010")
    for path in directory.iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    assert data("inspect", str(place))["max_over_mean"] == 1.2


class Page(HTMLParser):
    """Refuses tags that don't close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_links_to_nothing(eight: Path, tmp_path: Path) -> None:
    call("inspect", eight, "--html", tmp_path / "map.html")
    text = (tmp_path / "map.html").read_text()
    page = Page(text)
    assert page.open == []
    assert text.startswith("<!DOCTYPE html>\n")
    assert not {"script", "link", "img", "iframe", "a"} & set(page.seen)
    assert {value for name, value in page.attributes if name in ("src", "href", "xmlns")} == {
        "http://www.w3.org/2000/svg"
    }
    assert "url(" not in text
    svg = ElementTree.fromstring(re.search(r"<svg.*</svg>", text, re.DOTALL)[0])  # type: ignore[index]
    space = {"svg": "http://www.w3.org/2000/svg"}
    blocks = svg.findall("svg:rect[@class='block']", space)
    assert len(blocks) == 800
    titles = [block.findtext("svg:title", namespaces=space) for block in blocks]
    assert titles[:2] == ["model.layers.0.weight\nrank 0: [0:2, 0:4]", "model.layers.0.weight\nrank 1: [2:4, 0:4]"]
    assert {block.get("fill") for block in blocks} == set(colours(range(8)).values())
    assert [float(block.get("x") or 0) for block in blocks[:3]] == [520.0, 600.0, 680.0]


def test_what_a_page_shows_is_escaped(tmp_path: Path) -> None:
    hostile = 'model.<script>alert("1")</script>&'
    build(tmp_path / "<b>", {hostile: torch.ones(2)})
    call("inspect", tmp_path / "<b>", "--html", tmp_path / "map.html", "--key", "*<script>*")
    page = Page((tmp_path / "map.html").read_text())
    assert "script" not in page.seen
    assert page.open == []


def _survey(keys: int, ranks: int) -> Survey:
    entries = {f"model.{n}": KeyEntry(dtype="float32", shape=(ranks, 4)) for n in range(keys)}
    return Survey("x", "fsdp_dtensor_safe", (1, 0), {}, {"world": ranks}, ("model",), entries, False)


@pytest.mark.parametrize(
    ("keys", "ranks", "shown"), [(5, 8, 5), (100, 8, 100), (5000, 8, 100), (5000, 8960, 22), (9, 10**6, 1)]
)
def test_a_map_is_bounded_and_says_what_it_leaves_out(keys: int, ranks: int, shown: int) -> None:
    bounded = ShardMap.of(_survey(keys, ranks), "model.*")
    assert len(bounded.selected) == shown
    rest = keys - shown
    says = f"{rest} more keys match model.* and are left out: narrow the map with --key." if rest else ""
    assert bounded.left_out() == says


def test_very_many_blocks_are_drawn_as_runs_of_neighbours() -> None:
    found = _survey(1, 5000)
    shown = ShardMap.of(found, "*")
    for rank in range(5000):
        shown.visit("model.0", rank, Box((rank, 0), (1, 4)))
    [bar] = shown.bars()
    assert bar.merged
    assert len(bar.blocks) == 500  # runs of ten
    assert bar.blocks[1].text == "ranks 10 to 19: [10:20, 0:4], 10 chunks"
    assert sum(block.width * block.height for block in bar.blocks) == pytest.approx(1)


@pytest.mark.parametrize(
    ("shape", "offset", "size", "place"),
    [
        ((4, 10), (1, 0), (2, 10), (0.25, 0, 0.5, 1)),
        ((4, 10), (0, 5), (4, 5), (0, 0.5, 1, 0.5)),
        ((8,), (4,), (4,), (0.5, 0, 0.5, 1)),
        ((4, 2, 3), (2, 1, 0), (2, 1, 3), (0.5, 0.5, 0.5, 0.5)),
        ((), (), (), (0, 0, 1, 1)),
        ((0, 4), (0, 0), (0, 4), (0, 0, 0, 1)),
    ],
)
def test_blocks_lie_where_their_boxes_do(shape: Any, offset: Any, size: Any, place: Any) -> None:
    shown = ShardMap("*", {"key": KeyEntry(dtype="float32", shape=shape)}, 1)
    shown.visit("key", 3, Box(offset, size))
    [[block]] = [bar.blocks for bar in shown.bars()]
    assert (block.left, block.top, block.width, block.height) == place


@pytest.mark.parametrize("count", [1, 2, 8, 9, 32, 1000])
def test_each_rank_has_a_colour(count: int) -> None:
    found = list(colours(range(count)).values())
    assert len(found) == count
    assert all(re.fullmatch(r"#[0-9a-fA-F]{6}", colour) for colour in found)
    assert len(set(found)) > min(count - 1, 200)


def test_many_ranks_are_summarised(tmp_path: Path) -> None:
    state = {"model.weight": torch.zeros(100, dtype=torch.uint8)}
    build(tmp_path / "many", state, ranks=40)
    shown = call("inspect", tmp_path / "many").stdout
    rows = [line.split() for line in shown.splitlines()]
    assert sum(len(row) == 5 and row[1:] in (["2", "bytes", "1", "1"], ["3", "bytes", "1", "1"]) for row in rows) == 10
    assert "Shown are the 5 heaviest and the 5 lightest of 40 ranks." in shown
    assert len(data("inspect", tmp_path / "many")["ranks"]) == 40


def test_balance_of_nobody_and_of_nothing() -> None:
    assert balance({}).summary == ("No rank wrote anything.",)
    assert balance({0: RankShare()}).ratio == 1.0


def test_a_rank_that_wrote_nothing_counts(tmp_path: Path) -> None:
    place = build(tmp_path / "x", {"model.weight": torch.zeros(1)}, ranks=2)
    found = survey(place)
    visit_chunks(place, found)
    assert found.ranks == {0: RankShare(0, 0, 0), 1: RankShare(4, 1, 1)}
    assert balance(found.ranks).ratio == 2.0


def test_layers_are_in_natural_order() -> None:
    keys = ["layers.10.b", "layers.2.a", "layers.10.a", "embedding", "layers.2"]
    assert sorted(keys, key=natural) == ["embedding", "layers.2", "layers.2.a", "layers.10.a", "layers.10.b"]


@pytest.mark.parametrize(("text", "limit", "short"), [("abc", 3, "abc"), ("abcdefghij", 7, "ab…ghij")])
def test_long_names_lose_their_middle(text: str, limit: int, short: str) -> None:
    assert elided(text, limit) == short


def test_the_limits_are_what_the_documentation_says() -> None:
    assert (shard_map.MAX_KEYS, shard_map.MAX_BLOCKS, shard_map.NAMED_RANKS) == (100, 512, 32)
