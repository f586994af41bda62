"""docs/soak.md says what the last full runs found."""

import json

from tests.soak import report, sampling, words


def test_the_page_is_made_from_the_results() -> None:
    assert report.PAGE.read_text() == report.page(), "run: python -m tests.soak.report"


def test_no_recorded_run_missed_a_case() -> None:
    paths = sorted(sampling.RESULTS.glob("*.json"))
    assert {path.stem for path in paths} == set(words.MATRICES)
    assert {path.name for path in paths if '"missed' in path.read_text()} == set()


def test_every_kind_of_case_is_said_in_words() -> None:
    """A kind without words would stand on the page by its name, and what is accepted of it without a reason."""
    for name in ("damage", "disk", "hostile"):
        outcomes = json.loads((sampling.RESULTS / f"{name}.json").read_text())["outcomes"]
        assert set(outcomes) - set(words.ATTACKED) == set()
        assert {kind for kind, counts in outcomes.items() if "accepted" in counts} - set(words.HARMLESS) == set()
