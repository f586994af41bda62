"""docs/soak.md says what the last full runs found."""

from tests.soak import report, sampling


def test_the_page_is_made_from_the_results() -> None:
    assert report.PAGE.read_text() == report.page(), "run: python -m tests.soak.report"


def test_no_recorded_run_missed_a_case() -> None:
    paths = sorted(sampling.RESULTS.glob("*.json"))
    assert paths
    assert {path.name for path in paths if '"missed' in path.read_text()} == set()
