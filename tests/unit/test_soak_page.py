# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""docs/soak.md says what the last full runs found."""

import json

from tests.soak import kill, kill_beside, report, sampling, words


def test_the_page_is_made_from_the_results() -> None:
    assert report.PAGE.read_text() == report.page(), "run: python -m tests.soak.report"


def test_no_recorded_run_missed_a_case() -> None:
    paths = sorted(sampling.RESULTS.glob("*.json"))
    assert {path.stem for path in paths} == {*words.MATRICES, "whole"}
    assert {path.name for path in paths if '"missed' in path.read_text()} == set()


def test_nothing_failed_in_the_recorded_run_of_everything() -> None:
    outcomes = json.loads((sampling.RESULTS / "whole.json").read_text())["outcomes"]
    assert {ending for counts in outcomes.values() for ending in counts} <= {"passed", "skipped"}
    assert sum(counts["passed"] for counts in outcomes.values()) > 3_000


def test_every_kind_of_case_is_said_in_words() -> None:
    """A kind without words would stand on the page by its name, and what is accepted of it without a reason."""
    for name in ("damage", "disk", "disk_beside", "hostile"):
        outcomes = json.loads((sampling.RESULTS / f"{name}.json").read_text())["outcomes"]
        assert set(outcomes) - set(words.ATTACKED) == set()
        assert {kind for kind, counts in outcomes.items() if "accepted" in counts} - set(words.HARMLESS) == set()


def test_every_step_of_a_save_is_said_in_words() -> None:
    """By the function that takes it, which may be renamed."""
    assert {step.name.partition(":")[2] for step in (*kill.STEPS, *kill_beside.OWN_STEPS)} == set(words.STEPS)
