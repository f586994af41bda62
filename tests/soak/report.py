# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Writes docs/soak.md from the results of the last full runs:  python -m tests.soak.report"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from tests.soak.sampling import RESULTS, Outcomes
from tests.soak.words import ATTACKED, COUNTED, HARMLESS, MATRICES, SCENARIOS, STEPS

PAGE = RESULTS.parent / "soak.md"

HEAD = """# What was attacked, and what happened

A checkpoint is trusted when it counts: after a crash, on a bad disk, or when somebody else wrote it. So each way to
break one was tried systematically; such a series is a *matrix* here. `make test-all` runs all cases and writes their
results to `docs/soak/*.json`, from which `python -m tests.soak.report` makes this page. `make test` runs a fresh sample
of each matrix. Every case below passed: a test holds that no recorded one did not.
"""

Row = tuple[str, ...]


def page() -> str:
    """The whole page."""
    results = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in MATRICES}
    overview = [
        (f"[{MATRICES[name][0]}](#{_anchor(MATRICES[name][0])})", _number(_cases(result)), _counted(result["outcomes"]))
        for name, result in results.items()
    ]
    sections = [line for name, result in results.items() for line in section(name, result)]
    return "\n".join([HEAD, *_table(("matrix", "cases", "what happened"), overview), "", *sections, *_whole_run()])


def section(name: str, result: Mapping[str, Any]) -> list[str]:
    """One matrix: what was done, a table, and with what it ran."""
    title, done = MATRICES[name]
    versions = ", ".join(f"{package} {number}" for package, number in result["versions"].items())
    seed = f"seed {result['seed']}; {versions}"
    ran = f"{_number(_cases(result))} cases on {result['date']}, {result['seconds']:.0f} s; {seed}."
    facts = [
        f"- {fact}: {value:.3g}" if isinstance(value, float) else f"- {fact}: {value}"
        for fact, value in result["facts"].items()
        if fact != "accepted because"
    ]
    return [
        f"## {title}",
        "",
        done,
        "",
        *TABLES[name](result["outcomes"]),
        "",
        *facts,
        *([""] if facts else []),
        ran,
        "",
    ]


def _whole_run() -> list[str]:
    """Every test, with nothing sampled, once."""
    path = RESULTS / "whole.json"
    if not path.exists():
        return []
    result = json.loads(path.read_text())
    ended = sorted({ending for counts in result["outcomes"].values() for ending in counts})
    rows = [
        (f"`tests/{folder}`", *(_number(counts.get(ending, 0)) for ending in ended))
        for folder, counts in result["outcomes"].items()
    ]
    took, commit = f"{result['seconds'] / 60:.0f} minutes", result["facts"]["commit"]
    ran = f"`make test-all` of {result['date']} took {took}, at commit {commit}; seed {result['seed']}."
    return ["## The whole run", "", ran, "", *_table(("tests", *ended), rows), ""]


def _by_kind(outcomes: Outcomes) -> list[str]:
    rows = [
        (ATTACKED.get(kind, kind), _number(sum(counts.values())), _said(counts)) for kind, counts in outcomes.items()
    ]
    return _table(("what was attacked", "cases", "what happened"), rows)


def _with_reasons(outcomes: Outcomes) -> list[str]:
    rows = [
        (
            ATTACKED.get(kind, kind),
            _number(sum(counts.values())),
            _said(counts),
            HARMLESS.get(kind, "") if "accepted" in counts else "",
        )
        for kind, counts in outcomes.items()
    ]
    return _table(("what was attacked", "cases", "what happened", "why what was accepted is harmless"), rows)


def _of_optimizers(outcomes: Outcomes) -> list[str]:
    rows = [(kind, _number(sum(counts.values())), _said(counts)) for kind, counts in outcomes.items()]
    return _table(("what was otherwise", "cases", "what happened"), rows)


def _of_progress(outcomes: Outcomes) -> list[str]:
    rows = [(kind, _number(sum(counts.values())), _said(counts)) for kind, counts in outcomes.items()]
    return _table(("checkpoint and reader", "cases", "what happened"), rows)


def _of_deletions(outcomes: Outcomes) -> list[str]:
    rows = [(kind, _number(sum(counts.values())), _said(counts)) for kind, counts in outcomes.items()]
    return _table(("what deletes, where", "cases", "what happened"), rows)


def _of_imports(outcomes: Outcomes) -> list[str]:
    """Cases are called "Qwen3: removed"; families are added up."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for kind, counts in outcomes.items():
        found[kind.partition(": ")[2]].update(counts)
    rows = [(kind, _number(counts.total()), _said(counts)) for kind, counts in sorted(found.items())]
    return _table(("the tensor", "cases", "what happened"), rows)


def _of_plans(outcomes: Outcomes) -> list[str]:
    rows = [
        (kind.replace("_", " "), _number(sum(counts.values())), _number(counts.get("refused", 0)), _passed(counts))
        for kind, counts in outcomes.items()
    ]
    lines = _table(("damage", "cases", "refused", "let through"), rows)
    return [*lines, "", f"What was let through is harmless: {COUNTED}."]


def _of_kills(outcomes: Outcomes) -> list[str]:
    """Cases are called "fresh, after module:function 2, rank 0", or "fresh, rank 0"."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for kind, counts in outcomes.items():
        scenario, *place, _ = kind.split(", ")
        found[_step(place)].update({f"{scenario}, {outcome}": count for outcome, count in counts.items()})
    columns = [f"{scenario}, {age} state, killed" for scenario in ("fresh", "overwriting") for age in ("old", "new")]
    head = "killed at", "new directory: older found", "newer found", "overwriting: older found", "newer found"
    return _by_step(found, columns, head)


def _of_deaths(outcomes: Outcomes) -> list[str]:
    """Cases are called "trainer, before module:function"; they end with "old state, " and what the others saw."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for kind, counts in outcomes.items():
        who, *place = kind.split(", ")
        for outcome, count in counts.items():
            found[_step(place)][f"{who}, {outcome.partition(', ')[0]}"] += count
    columns = [f"{who}, {age} state" for who in ("trainer", "writer", "both") for age in ("old", "new")]
    head = (
        "killed before",
        *(f"{who}: {age} found" for who in ("trainer killed", "writer killed", "both") for age in ("older", "newer")),
    )
    return _by_step(found, columns, head)


def _by_step(found: Mapping[str, Counter[str]], columns: list[str], head: tuple[str, ...]) -> list[str]:
    """Steps in words as a save takes them, what has no words last."""
    known = list(STEPS.values())
    steps = sorted(found, key=lambda step: (known.index(step) if step in known else len(known), step))
    return _table(head, [(step, *(_number(found[step][column]) for column in columns)) for step in steps])


def _step(place: list[str]) -> str:
    """Of "after storage.commit.rename:sync_directory 2": what that function does."""
    if not place:
        return "a random moment"
    function = place[0].split()[1].partition(":")[2]
    return STEPS.get(function, f"`{function}`")


def _of_slowness(outcomes: Outcomes) -> list[str]:
    """Cases are called "load, read"."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for kind, counts in outcomes.items():
        scenario, call = kind.split(", ")
        found[scenario][call] += sum(counts.values())
    rows = [
        (
            SCENARIOS[scenario],
            _number(calls.total()),
            ", ".join(f"{call} {count}" for call, count in sorted(calls.items())),
        )
        for scenario, calls in sorted(found.items(), key=lambda item: list(SCENARIOS).index(item[0]))
    ]
    return [*_table(("during", "cases", "which call was slow"), rows), "", f"What happened: {_counted(outcomes)}."]


TABLES = {
    "damage": _by_kind,
    "hostile": _with_reasons,
    "disk": _by_kind,
    "disk_beside": _by_kind,
    "slow": _of_slowness,
    "slow_beside": _of_slowness,
    "kill_steps": _of_kills,
    "kill_moments": _of_kills,
    "kill_beside": _of_deaths,
    "deletions": _of_deletions,
    "signals": _of_optimizers,
    "optimizers": _of_optimizers,
    "progress": _of_progress,
    "plans": _of_plans,
    "imports": _of_imports,
}


def _table(head: Row, rows: Iterable[Row]) -> list[str]:
    """Counts stand on the right."""
    counts = "cases", "refused", "let through"
    marks = ["---:" if name in counts or name.endswith("found") else "---" for name in head]
    return [f"| {' | '.join(row)} |" for row in (head, marks, *rows)]


def _cases(result: Mapping[str, Any]) -> int:
    return sum(sum(counts.values()) for counts in result["outcomes"].values())


def _counted(outcomes: Outcomes) -> str:
    total: Counter[str] = Counter()
    for counts in outcomes.values():
        total.update(counts)
    return _said(total)


def _said(counts: Mapping[str, int]) -> str:
    """Errors before what is no error, the most frequent first."""
    order = sorted(counts, key=lambda outcome: (outcome == "accepted", -counts[outcome], outcome))
    return ", ".join(f"{_in_words(outcome)}: {_number(counts[outcome])}" for outcome in order)


def _in_words(outcome: str) -> str:
    words = {
        "old state, killed": "resumed from the older checkpoint",
        "new state, killed": "resumed from the newer one",
        "passes: every element is written once": "let through, every element is written once",
        "old state": "the older checkpoint",
        "new state": "the newer one",
    }
    state, _, seen = outcome.rpartition(", ")
    if state in words and outcome not in words:
        return f"{words[state]}, {_in_words(seen)}"
    return words.get(outcome, f"`{outcome}`" if outcome.endswith("Error") else outcome)


def _passed(counts: Mapping[str, int]) -> str:
    return _number(sum(count for outcome, count in counts.items() if outcome.startswith("passes")))


def _number(count: int) -> str:
    return f"{count:,}"


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


if __name__ == "__main__":
    PAGE.write_text(page())
