# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The harness of the benchmarks: what counts, what is compared, what is written."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.harness import Benchmark, Found, Say, in_turns, slowest, slowest_turns, table


@dataclass(frozen=True)
class Row:
    """What a made-up benchmark finds."""

    name: str
    seconds: float


def _measured(arguments: argparse.Namespace, say: Say) -> Iterator[Found]:
    rows: list[Row] = []
    for number in range(arguments.rows):
        if number == 2:
            raise RuntimeError("the disk is full")
        say(f"row {number}")
        rows.append(Row(f"row {number}", number / 4))
        yield {"rows": rows}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=1)


def _made_up(**more: object) -> Benchmark:
    return Benchmark(
        command="python -m benchmarks.made_up",
        name="made_up",
        title="Made up",
        about="Left out of the page.\n\nWhat it measures.",
        measure=_measured,
        body=lambda found: table(["name", "s"], ([row.name, f"{row.seconds:.2f}"] for row in found["rows"])),
        options=_options,
        **more,  # type: ignore[arg-type]
    )


def test_kinds_take_turns_and_the_first_turn_does_not_count() -> None:
    order: list[str] = []

    def turn() -> Iterator[tuple[str, int]]:
        for kind in ("ours", "theirs"):
            order.append(kind)
            yield kind, len(order)

    assert in_turns(turn, 2) == {"ours": [3, 5], "theirs": [4, 6]}
    assert order == ["ours", "theirs"] * 3


def test_the_slowest_rank_of_each_turn_counts() -> None:
    ranks = [{"save": [1.0, 9.0, 2.0]}, {"save": [3.0, 1.0, 2.5]}]
    assert slowest_turns(ranks) == {"save": [3.0, 9.0, 2.5]}
    assert slowest(ranks) == {"save": 3.0}


def test_the_page_and_the_raw_results_are_written_and_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[Path] = []
    benchmark = _made_up(draw=lambda found, path: drawn.append(path), suffix=lambda arguments: f"_{arguments.rows}")
    benchmark.main(["--rows", "1", "--results", str(tmp_path), "--repeats", "7"])
    page = (tmp_path / "made_up_1.md").read_text()
    assert page.startswith("# Made up\n\nWhat it measures.\n\n![Made up, as a picture](made_up_1.png)\n\n- date: ")
    assert "\n- command: python -m benchmarks.made_up --rows 1 --results" in page
    assert "\n- repeats: 7\n" in page
    assert page.endswith("\n\n| name | s |\n| --- | --- |\n| row 0 | 0.00 |\n")
    found = json.loads((tmp_path / "made_up_1.json").read_text())
    assert found["rows"] == [{"name": "row 0", "seconds": 0.0}]
    assert found["about"]["repeats"] == "7"
    assert drawn == [tmp_path / "made_up_1.png"]
    assert page in capsys.readouterr().out


def test_what_was_found_before_an_error_is_kept(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the disk is full"):
        _made_up().main(["--rows", "3", "--results", str(tmp_path)])
    assert (tmp_path / "made_up.md").read_text().endswith("| row 1 | 0.25 |\n")


def test_a_dry_run_writes_nothing_and_a_quick_one_elsewhere_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _made_up().main(["--dry", "--results", "results"])
    assert list(tmp_path.iterdir()) == []
    _made_up(quick=True).main(["--quick"])
    assert "\n- repeats: 1\n" in (tmp_path / "out" / "benchmarks" / "made_up.md").read_text()
    with pytest.raises(SystemExit):
        _made_up().main(["--repeats", "0"])
    assert "at least 1" in capsys.readouterr().err
