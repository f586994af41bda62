# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`timeline`: who was slow, by hand-made times; the picture and the page of few ranks and of many."""

from __future__ import annotations

import json
import random
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mbridge_fsdp_ckpt.errors import ManifestError, NoTimesError
from mbridge_fsdp_ckpt.format.manifest import read_manifest
from mbridge_fsdp_ckpt.phases import Phase
from mbridge_fsdp_ckpt.tools.timeline.facts import moment
from mbridge_fsdp_ckpt.tools.timeline.html import draw_html
from mbridge_fsdp_ckpt.tools.timeline.lanes import DRAWN_LANES, SLOWEST, Lane, Timeline, timeline
from tests.unit import handmade
from tests.unit.test_cli import call, data

BEGUN = 1_795_424_400.0


def lane(rank: int, begun: float | None = BEGUN, **seconds: float) -> Lane:
    """A rank whose phases follow each other."""
    phases, at = [], 0.0
    for name, took in seconds.items():
        phases.append(Phase(name, at, took))
        at += took
    return Lane(rank, 0.0, tuple(phases), begun)


def saved(rank: int, begun: float | None = BEGUN, write: float = 1.0, agree: float = 0.5, plan: float = 0.1) -> Lane:
    return lane(rank, begun, plan=plan, agree=agree, write=write, flush=0.2)


def slow_of(*lanes: Lane) -> set[tuple[int, str]]:
    return {(one.rank, one.phase) for one in Timeline.of("x", lanes).stragglers}


def test_a_straggler_is_slower_by_half_and_by_a_tenth_of_a_second() -> None:
    usual = [saved(rank) for rank in range(3)]
    assert slow_of(*usual, saved(3, write=1.5)) == set()
    assert slow_of(*usual, saved(3, write=1.51)) == {(3, "write")}
    assert slow_of(*usual, saved(3, plan=0.2)) == set(), "twice as slow, by no more than a tenth"
    assert slow_of(*usual, saved(3, plan=0.21)) == {(3, "plan")}


def test_who_waits_is_no_straggler() -> None:
    assert slow_of(*(saved(rank, agree=5.0) for rank in range(1)), *(saved(rank) for rank in range(1, 4))) == set()


def test_a_rank_without_a_phase_took_no_time_for_it() -> None:
    """Of three ranks one compares copies: what it does and the others need not is named."""
    others = [saved(0), saved(1)]
    found = Timeline.of("x", [*others, lane(2, plan=0.1, agree=0.5, write=1.0, flush=0.2, compare=3.0)])
    assert [one.said for one in found.stragglers] == ["rank 2: compare 3.00 s, median 0.00 s"]
    assert found.medians["compare"] == 0.0


def test_the_slowest_comes_first() -> None:
    found = Timeline.of("x", [*(saved(rank) for rank in range(4)), saved(7, write=9.0), saved(5, write=3.0)])
    assert [(one.rank, one.seconds, one.usual) for one in found.stragglers] == [(7, 9.0, 1.0), (5, 3.0, 1.0)]


def test_lanes_meet_where_the_first_meeting_ended_whatever_hosts_clocks_say() -> None:
    """Rank 1 came 0.4 s later than rank 0; its host's clock is an hour ahead."""
    found = Timeline.of("x", [saved(0, agree=0.5), saved(1, begun=BEGUN + 3600.0, agree=0.1)], BEGUN + 2.0)
    assert [one.start for one in found.lanes] == pytest.approx([0.0, 0.4])
    assert found.commit == pytest.approx(2.0)
    assert found.end == pytest.approx(2.0)


def test_without_a_meeting_clocks_count() -> None:
    found = Timeline.of("x", [lane(0, write=1.0), lane(1, BEGUN + 0.25, write=1.0)], BEGUN + 0.5)
    assert [one.start for one in found.lanes] == [0.0, 0.25]
    assert (found.commit, found.end) == (0.5, 1.25)
    nothing_known = Timeline.of("x", [lane(0, None, write=1.0), lane(1, BEGUN, write=1.0)])
    assert [one.start for one in nothing_known.lanes] == [0.0, 0.0]


def test_a_commit_before_the_beginning_is_none() -> None:
    assert Timeline.of("x", [saved(0)], BEGUN - 1.0).commit is None
    assert Timeline.of("x", [saved(0, begun=None)], BEGUN).commit is None


def test_a_moment_beyond_all_calendars_is_a_number() -> None:
    assert moment(0.0) == "1970-01-01 00:00:00 UTC"
    assert moment(1e11) == "5138-11-16 09:46:40 UTC" or moment(1e11) == "100000000000 s of UNIX time"
    assert moment(1e12) == "1000000000000 s of UNIX time"


# In a checkpoint


def timed(directory: Path, rank: int, **record: Any) -> None:
    """Say more in a rank's record."""

    def change(part: handmade.Part) -> None:
        part["record"] = json.dumps(json.loads(part["record"]) | record).encode()

    handmade.edit(directory, rank, change)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two ranks, the second one slow."""
    made = handmade.make(tmp_path / "iter_0000010")
    for rank, write in ((0, 1.0), (1, 4.0)):
        timed(made, rank, begun=BEGUN + rank, phases=[["agree", 0, 0.5], ["write", 0.5, write]])
    metadata = read_manifest(made)
    handmade.write_manifest(made / "manifest.json", metadata.model_copy(update={"time": BEGUN + 5.0}))
    return made


def test_a_checkpoint_tells_what_was_written(directory: Path) -> None:
    found = timeline(directory)
    assert [(one.rank, one.begun, one.phases) for one in found.lanes] == [
        (0, BEGUN, (("agree", 0.0, 0.5), ("write", 0.5, 1.0))),
        (1, BEGUN + 1.0, (("agree", 0.0, 0.5), ("write", 0.5, 4.0))),
    ]
    assert found.commit == pytest.approx(5.0)
    assert [one.said for one in found.stragglers] == ["rank 1: write 4.00 s, median 2.50 s"]


def test_the_command_shows_it(directory: Path) -> None:
    shown = call("timeline", directory)
    assert (shown.exit_code, shown.stderr) == (0, "")
    rows = [text.split() for text in shown.stdout.splitlines()]
    assert ["write", "2.500", "4.000", "1", "1"] in rows
    assert ["agree", "0.500", "0.500", "0", "waits"] in rows
    assert ["1", "0.500", "4.000*", "4.000"] in rows
    assert "* rank 1: write 4.00 s, median 2.50 s" in shown.stdout.splitlines()
    assert "begun        2026-11-23 09:00:00 UTC" in shown.stdout


def test_as_data(directory: Path, tmp_path: Path) -> None:
    found = data("timeline", directory, "--html", tmp_path / "t.html")
    assert found["stragglers"] == [{"rank": 1, "phase": "write", "seconds": 4.0, "median": 2.5}]
    assert found["medians"] == {"agree": 0.5, "write": 2.5}
    assert found["ranks"]["1"]["phases"][1] == {"name": "write", "begin": 0.5, "seconds": 4.0}
    assert found["written"] == [str(tmp_path / "t.html")]
    assert (tmp_path / "t.html").read_text().startswith("<!DOCTYPE html>")


def test_a_checkpoint_without_times_is_a_named_error(tmp_path: Path) -> None:
    made = handmade.make(tmp_path / "iter_0000010")
    with pytest.raises(NoTimesError, match="fsdp_dtensor_safe"):
        timeline(made)
    shown = call("timeline", made)
    assert shown.exit_code == 1
    assert shown.stderr.startswith("NoTimesError: ")


def test_a_rank_that_says_nothing_is_left_out(tmp_path: Path) -> None:
    made = handmade.make(tmp_path / "iter_0000010")
    timed(made, 1, phases=[["write", 0, 1]])
    assert [one.rank for one in timeline(made).lanes] == [1]


@pytest.mark.parametrize(
    "record",
    [
        {"begun": -1.0},
        {"begun": 1e12},
        {"begun": "1"},
        {"begun": True},
        {"phases": {"write": 1.0}},
        {"phases": [["write", 0.0]]},
        {"phases": [["write", 0.0, 1.0, 2.0]]},
        {"phases": [["write", 0.0, -0.5]]},
        {"phases": [["write", True, 1.0]]},
        {"phases": [["write", "0", 1.0]]},
        {"phases": [["", 0.0, 1.0]]},
        {"phases": [["Write\u001b[2J", 0.0, 1.0]]},
        {"phases": [["w" * 33, 0.0, 1.0]]},
        {"phases": [["write", 0.0, 1.0]] * 65},
        {"phases": None},
    ],
    ids=str,
)
def test_times_that_cannot_be_are_refused(tmp_path: Path, record: dict[str, Any]) -> None:
    made = handmade.make(tmp_path / "iter_0000010")
    timed(made, 0, **record)
    with pytest.raises(ManifestError, match="a valid RankOwn"):
        timeline(made)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_what_is_no_number_is_refused(tmp_path: Path, number: str) -> None:
    made = handmade.make(tmp_path / "iter_0000010")

    def change(part: handmade.Part) -> None:
        part["record"] = part["record"][:-1] + f', "begun": {number}}}'.encode()

    handmade.edit(made, 0, change)
    with pytest.raises(ManifestError):
        timeline(made)


def test_the_groups_index_file_has_no_times(directory: Path, tmp_path: Path) -> None:
    without = handmade.make(tmp_path / "iter_0000020")
    assert (directory / handmade.GROUP).read_bytes() == (without / handmade.GROUP).read_bytes()


def test_times_are_no_difference(directory: Path, tmp_path: Path) -> None:
    without = handmade.make(tmp_path / "iter_0000020")
    shown = call("diff", directory, without)
    assert shown.exit_code == 0, shown.stdout
    assert call("verify", directory).exit_code == 0


# Drawn


def many(count: int) -> Timeline:
    """Ranks whose times vary by a tenth, three of them slow."""
    dice = random.Random(5)
    lanes = [
        lane(
            rank,
            plan=0.2 * dice.uniform(0.9, 1.1),
            agree=0.3,
            write=(9.0 if rank in (17, count // 2, count - 1) else 3.0) * dice.uniform(0.9, 1.1),
            flush=1.0 * dice.uniform(0.9, 1.1),
        )
        for rank in range(count)
    ]
    return Timeline.of("/run/iter_0000010", lanes, BEGUN + 12.0)


class Page(HTMLParser):
    """Tags, their attributes, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_of_few_ranks_has_every_phase_and_marks_the_slow() -> None:
    found = Timeline.of("/run/iter", [*(saved(rank) for rank in range(3)), saved(3, write=6.0)], BEGUN + 9.0)
    page = Page(draw_html(found))
    bars = [attributes for tag, attributes in page.tags if tag == "rect"]
    assert len(bars) == 4 * 4
    assert sum(attributes.get("class") == "slow" for attributes in bars) == 1
    assert "rank 3: write 6.000 s, straggler" in page.text
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "img", "iframe"})
    assert not any("href" in attributes or "src" in attributes for _, attributes in page.tags)


def test_a_page_is_inside_its_picture() -> None:
    found = many(100)
    for tag, attributes in Page(draw_html(found)).tags:
        if tag == "rect":
            assert 90 <= float(str(attributes["x"])) <= 1330.01
            assert float(str(attributes["x"])) + float(str(attributes["width"])) <= 1330.02


@pytest.mark.parametrize("count", [1000, 5000])
def test_of_many_ranks_the_slowest_are_shown(count: int) -> None:
    found = many(count)
    assert {one.rank for one in found.stragglers} == {17, count // 2, count - 1}
    assert {one.rank for one in found.slowest} > {17, count // 2, count - 1}
    assert len(found.slowest) == SLOWEST
    drawn = [one.rank for one in found.drawn]
    assert drawn == sorted(drawn)
    assert len(drawn) <= DRAWN_LANES
    assert {17, count // 2, count - 1} <= set(drawn)
    assert (len(found.notes) == 2) == (count > DRAWN_LANES)
    assert len(draw_html(found)) < 4_000_000


def four() -> Timeline:
    return Timeline.of("/run/iter_0000010", [saved(0), saved(1, agree=0.2), saved(2, write=4.0), saved(3)], BEGUN + 6.0)


def test_times_at_the_end_of_what_is_allowed_are_drawn(tmp_path: Path) -> None:
    made = handmade.make(tmp_path / "iter_0000010")
    timed(made, 0, begun=1e11, phases=[["agree", 1e11, 1e11], ["write", 0, 0]])
    timed(made, 1, begun=0, phases=[["write", 0, 1e11]])
    shown = call("timeline", made, "--html", tmp_path / "t.html")
    assert shown.exit_code == 0, shown.stderr
