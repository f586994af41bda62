# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The pictures of the pages:  python -m tools.pictures  writes docs/pictures/*.svg."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.canvas import BLUE, FAINT, GREEN, GREY, NORMAL, YELLOW, Canvas

REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / "docs" / "pictures"
RESULTS = REPOSITORY / "benchmarks" / "results" / "stock_and_safe.json"

_EXPERTS, _LAYERS, _RANKS = 64, 8, 4
_SEEN = 6  # a shorter bar has no shape
_LANES = (62, 142, 222)
_NAMES = ("rank 0", "rank 1", "rank N")
_WIDTH = 860


def _lanes(canvas: Canvas, title: str, note: str) -> None:
    canvas.text(18, 24, title, size=NORMAL + 2, strong=True)
    canvas.text(_WIDTH - 18, 24, note, across="right", colour=FAINT)
    for number, (top, name) in enumerate(zip(_LANES, _NAMES, strict=True)):
        canvas.text(18, top + 14, name, strong=True)
        canvas.shards(18, top + 28, (18, 18, 18), number)
        canvas.shards(18, top + 41, (18, 18, 18), number)


def save() -> Canvas:
    """A save: who holds what, where it goes, what waits for what."""
    canvas = Canvas(_WIDTH, 474)
    _lanes(canvas, "A save", "time runs to the right; no collective anywhere")
    for top in _LANES:
        canvas.box(92, top, 112, 60, "plan\nfrom metadata")
        canvas.box(272, top, 172, 60, "write\nown chunks and index")
        canvas.arrow((204, top + 30), (215, top + 30))
        canvas.arrow((259, top + 30), (271, top + 30))
        canvas.arrow((444, top + 30), (456, top + 30))
        canvas.arrow((742, top + 30), (753, top + 30))
        canvas.box(754, top, 90, 60, "train on", ("#ffffff", GREY[1]))
    canvas.bar(216, 62, 42, 220, "meeting 1: do the plans\nwrite each element once?")
    canvas.bar(457, 62, 42, 220, "meeting 2: has every rank\nwritten? merge the index")
    canvas.box(512, 62, 186, 60, "check, write metadata\nrename, then tracker")
    canvas.arrow((500, 92), (511, 92))
    for number, line in enumerate(
        ("the others wait for", "the decision; whoever", "stays away is named", "after a time limit")
    ):
        canvas.text(592, 176 + 20 * number, line, across="center", colour=FAINT)
    canvas.bar(711, 62, 30, 220, "one decision for all")
    canvas.arrow((699, 92), (710, 92))
    canvas.text(18, 322, "on disk", strong=True)
    canvas.arrow((358, 282), (358, 303))
    canvas.box(
        272, 304, 374, 52, ".staging-iter_0000020-…\n__*.distcp, rank_*.index, group_*.index, manifest.json", GREY
    )
    canvas.box(92, 366, 554, 36, "iter_0000010: a resume finds it until the tracker names the new one", GREEN)
    canvas.arrow((646, 330), (657, 330))
    canvas.arrow((686, 122), (686, 303))
    canvas.box(658, 304, 186, 98, "iter_0000020\nappears whole, by one\nrename, or not at all", GREEN)
    canvas.text(18, 428, "Blue bars: the shard of weights and of optimizer state that a rank holds.", colour=FAINT)
    canvas.text(
        18, 450, "If a rank fails or does not arrive, all ranks raise the same named error, and iter_0000010 stands."
    )
    return canvas


def load() -> Canvas:
    """A load: what is checked before anything changes."""
    canvas = Canvas(_WIDTH, 436)
    _lanes(canvas, "A load", "in any layout; no live tensor changes before all ranks agree")
    for top in _LANES:
        canvas.box(92, top, 118, 60, "open, match\nkeys, shapes")
        canvas.box(220, top, 160, 60, "verify every byte\nfill new slots")
        canvas.box(442, top, 140, 60, "fill weights\nput slots in place")
        canvas.box(644, top, 112, 60, "gather\nfor compute")
        canvas.box(766, top, 78, 60, "train on", ("#ffffff", GREY[1]))
        for start in (210, 380, 432, 582, 634, 756):
            canvas.arrow((start, top + 30), (start + 9, top + 30))
    canvas.bar(390, 62, 42, 220, "meeting 1: is every key\nasked for?")
    canvas.bar(592, 62, 42, 220, "meeting 2: has every\nrank filled?")
    canvas.text(18, 322, "on disk", strong=True)
    canvas.box(92, 304, 490, 36, "iter_0000020: head and index, then each chunk that a rank needs", GREEN)
    canvas.arrow((300, 303), (300, 283))
    canvas.arrow((512, 303), (512, 283))
    canvas.text(18, 368, "memory", strong=True)
    canvas.box(92, 350, 340, 36, "model and optimizer as they were", GREY)
    canvas.box(442, 350, 192, 36, "being filled", YELLOW)
    canvas.box(644, 350, 200, 36, "the saved state", GREEN)
    canvas.text(
        18, 412, "An error before meeting 1 has passed changes nothing; a later one says that the process has to end."
    )
    return canvas


def stock() -> Canvas:
    """Seconds and collectives of stock `fsdp_dtensor` and of this format, side by side."""
    canvas = Canvas(_WIDTH, 338)
    canvas.text(18, 24, "Against stock fsdp_dtensor", size=NORMAL + 2, strong=True)
    about = f"{_EXPERTS} experts x {_LAYERS} layers, {_RANKS} CPU ranks, slowest rank"
    canvas.text(_WIDTH - 18, 24, about, across="right", colour=FAINT)
    rows = {
        "training waits, seconds": _measured("save", "seconds", beside=True),
        "save, seconds": _measured("save", "seconds"),
        "load, seconds": _measured("load", "seconds"),
        "collectives of a save": _measured("save", "collectives"),
    }
    for number, (name, (theirs, ours)) in enumerate(rows.items()):
        top = 52 + 70 * number
        canvas.text(206, top + 26, name, across="right", strong=True)
        for y, value, who, colours in ((top, theirs, "stock", GREY), (top + 28, ours, "safe", BLUE)):
            length = max(490 * value / max(theirs, ours), _SEEN) if value else 0
            if length:
                canvas.box(220, y, length, 24, "", (colours[1], colours[1]))
            canvas.text(228 + length, y + 12, f"{_short(value)}  {who}")
    return canvas


def _measured(kind: str, field: str, *, beside: bool = False) -> tuple[float, float]:
    """Medians, over repeated calls, of the slowest rank, of saves after a run's first: stock's, and ours.

    With `beside`, ours is that of asynchronous saves.
    """
    found: dict[tuple[str, bool], list[float]] = {}
    for measured in json.loads(RESULTS.read_text())["cases"]:
        case = measured["case"]
        if (case["size"]["experts"], case["size"]["layers"], case["ranks"]) == (_EXPERTS, _LAYERS, _RANKS):
            jobs = measured["trained"] if kind == "save" else measured["resumed"]
            found[case["format"], case["beside"]] = [value for job in jobs for value in _slowest(job, kind, field)]
    return statistics.median(found["fsdp_dtensor", False]), statistics.median(found["fsdp_dtensor_safe", beside])


def _slowest(ranks: list[dict[str, Any]], kind: str, field: str) -> list[float]:
    calls = zip(*([call for call in rank["calls"] if call["kind"] == kind] for rank in ranks), strict=True)
    slowest = [max(call["whole"][field] for call in of_all_ranks) for of_all_ranks in calls]
    return slowest[1:] if kind == "save" else slowest


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


PICTURES: dict[str, Callable[[], Canvas]] = {"save.svg": save, "load.svg": load, "stock.svg": stock}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file_name, draw in PICTURES.items():
        (FOLDER / file_name).write_bytes(draw().svg())
