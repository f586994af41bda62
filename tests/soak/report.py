"""Writes docs/soak.md from the results of the last full runs:  python -m tests.soak.report"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.soak.sampling import RESULTS

PAGE = RESULTS.parent / "soak.md"

HEAD = """# Results of the full matrices

Written by `python -m tests.soak.report` from `docs/soak/*.json`, which `make test-all` writes. `make test` runs a
fresh sample of each matrix. Numbers are cases.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(section(path) for path in sorted(RESULTS.glob("*.json")))])


def section(path: Path) -> str:
    """One matrix: when and with what it ran, and a table of kinds by outcomes."""
    result: dict[str, Any] = json.loads(path.read_text())
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    cases = sum(sum(counts.values()) for counts in result["outcomes"].values())
    ran = f"{cases} cases in {result['seconds']} s on {result['date']}, seed {result['seed']}; {versions}."
    facts = [f"- {name}: {value}" for name, value in result["facts"].items()]
    return "\n".join(
        [f"## {path.stem}", "", ran, "", *([*facts, ""] if facts else []), *_table(result["outcomes"]), ""]
    )


def _table(outcomes: dict[str, dict[str, int]]) -> list[str]:
    columns = sorted({outcome for counts in outcomes.values() for outcome in counts})
    lines = [f"| kind | {' | '.join(columns)} |", f"| --- {'| ---: ' * len(columns)}|"]
    lines += [
        f"| {kind} | {' | '.join(str(counts.get(column, '')) for column in columns)} |"
        for kind, counts in outcomes.items()
    ]
    return lines


if __name__ == "__main__":
    PAGE.write_text(page())
