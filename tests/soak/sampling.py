# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""How many cases of a matrix run, and where the result of a full run is kept.

`make test` runs a part of a matrix, drawn anew each time; `make test-all` (MBRIDGE_SOAK=1) runs all and writes
docs/soak/<name>.json.  MBRIDGE_SOAK_SEED repeats a draw.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from testing.machine import versions
from tools.circumstances import today

RESULTS = Path(__file__).parents[2] / "docs" / "soak"
FULL = os.environ.get("MBRIDGE_SOAK") == "1"
SHARE = 15  # one in so many cases runs by default

Outcomes = dict[str, dict[str, int]]
"""For each kind of case, how many ended in which way."""


@cache
def seed() -> int:
    """The seed of this run: given, or drawn once a process."""
    return int(os.environ.get("MBRIDGE_SOAK_SEED") or random.SystemRandom().randrange(1 << 32))


def rng(name: str) -> random.Random:
    """Random numbers of one matrix: the same for the same seed, whichever other matrices ran before."""
    return random.Random(f"{name} {seed()}")


def drawn[T](name: str, matrix: Sequence[T], share: int = SHARE) -> list[T]:
    """The cases of a matrix that run now, in the matrix's order: all, or afresh one in `share`."""
    if FULL:
        return list(matrix)
    count = max(1, len(matrix) // share)
    return [matrix[i] for i in sorted(rng(f"{name} draw").sample(range(len(matrix)), count))]


def how_to_repeat() -> str:
    """For the output of every matrix and every message of a failure."""
    return f"MBRIDGE_SOAK_SEED={seed()}{' MBRIDGE_SOAK=1' if FULL else ''} repeats this draw"


def tally(pairs: Iterable[tuple[str, str]]) -> Outcomes:
    """Counts of (kind, outcome)."""
    counts = Counter(pairs)
    found: Outcomes = {}
    for kind, outcome in sorted(counts):
        found.setdefault(kind, {})[outcome] = counts[kind, outcome]
    return found


@dataclass(frozen=True, slots=True)
class Result:
    """What a matrix found.

    Args:
        seconds: How long it took.
        outcomes: See `Outcomes`.
        facts: What else the report shows, such as the largest memory.
    """

    seconds: float
    outcomes: Outcomes
    facts: Mapping[str, str | int | float] = field(default_factory=dict)


def record(name: str, result: Result) -> None:
    """Keep the result of a full run, and write the page of all results anew; a sample leaves nothing."""
    if not FULL:
        return
    from tests.soak import report

    keep(RESULTS / f"{name}.json", result)
    report.PAGE.write_text(report.page())


def keep(path: Path, result: Result) -> None:
    """Write a result with its date and what it ran on."""
    body: dict[str, Any] = {
        "date": today(),
        "seed": seed(),
        "versions": versions(),
        "seconds": round(result.seconds, 1),
        "outcomes": result.outcomes,
        "facts": dict(result.facts),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body, indent=1) + "\n")
