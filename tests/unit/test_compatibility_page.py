"""docs/compatibility.md says what the tests prove now."""

from tests import compatibility


def test_the_tables_are_those_of_the_tests() -> None:
    page = compatibility.PAGE.read_text()
    assert compatibility.rewritten(page) == page, "run: python -m tests.compatibility"


def test_every_family_loads_in_three_layouts_that_differ() -> None:
    layouts: dict[str, set[object]] = {}
    for proof in [*compatibility.family_proofs(), *compatibility.model_proofs()]:
        if not proof.skipped:
            assert proof.columns() is not None
            changed = set(proof.columns()) - {"ranks alone"}
            layouts.setdefault(proof.row, set()).update([proof.loaded_in] if changed else [])
    assert {row: len(found) for row, found in layouts.items() if len(found) < 3} == {}
