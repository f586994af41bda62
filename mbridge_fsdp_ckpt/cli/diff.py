"""`diff`: do two checkpoints hold the same, whatever layout and format they were saved in?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Any

import typer

from mbridge_fsdp_ckpt.care.compare import (
    Progress,
    Side,
    Tolerance,
    Unequal,
    batches,
    compare_key,
    flattened,
    same_value,
)
from mbridge_fsdp_ckpt.cli.console import EXIT_CODES, Json, app, print_json, progress_bar, say
from mbridge_fsdp_ckpt.hosts.root import find_checkpoint
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.storage.commit.retention import reading
from mbridge_fsdp_ckpt.storage.opening import open_checkpoint
from mbridge_fsdp_ckpt.storage.source import CheckpointSource
from mbridge_fsdp_ckpt.storage.store import AnyPath, as_path

_ABSENT = "(absent)"


@dataclass(slots=True)
class Differences:
    """All that differs, by name."""

    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    structure: dict[str, tuple[str, str]] = field(default_factory=dict)
    tensors: dict[str, Unequal] = field(default_factory=dict)
    values: dict[str, tuple[str, str]] = field(default_factory=dict)
    compared: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether there are none."""
        return not (self.only_in_a or self.only_in_b or self.structure or self.tensors or self.values)


@app.command(epilog=EXIT_CODES)
def diff(
    a: Annotated[str, typer.Argument(help="An iteration directory, or the root of a run's checkpoints.")],
    b: Annotated[str, typer.Argument(help="The other one; it may be saved in another layout or format.")],
    rtol: Annotated[float, typer.Option(min=0, help="Relative tolerance; 0 and 0: bits must be equal.")] = 0.0,
    atol: Annotated[float, typer.Option(min=0, help="Absolute tolerance.")] = 0.0,
    values: Annotated[
        bool, typer.Option(help="Compare what tensors and other state hold, not only keys, shapes and dtypes.")
    ] = True,
    key: Annotated[str, typer.Option(metavar="PATTERN", help="Compare only names like this.")] = "*",
    as_json: Json = False,
) -> None:
    """Compare two checkpoints: keys, shapes, dtypes, tensors, and other state.

    Other state goes by the names values.* and hyperparameters.*; random-number states are not compared.
    """
    if not (math.isfinite(rtol) and math.isfinite(atol)):
        raise typer.BadParameter("a tolerance must be finite")
    places = [find_checkpoint(as_path(place)) for place in (a, b)]
    with reading(places[0]) as alive, reading(places[1]) as other_alive:

        def beat() -> None:
            alive()
            other_alive()

        found = _differences(places, Tolerance(rtol, atol), key, values, beat)
    if as_json:
        print_json(_as_data(places, found))
    else:
        _show(places, found)
    if not found.equal:
        raise typer.Exit(1)


def _differences(places: list[AnyPath], tolerance: Tolerance, pattern: str, values: bool, beat: Any) -> Differences:
    one, other = (open_checkpoint(place) for place in places)
    found = Differences()
    same = _compare_keys(one, other, pattern, found)
    if not values:
        found.notes.append("what tensors and other state hold was not compared (--no-values)")
        return found
    _compare_values(one, other, pattern, found)
    with progress_bar() as bar:
        bar.begin("comparing", sum(one.head.keys[name].nbytes for name in same))

        def progress(count: int) -> None:
            beat()
            bar.advance(count)

        _compare_tensors(one, other, same, tolerance, found, progress)
    return found


def _compare_keys(a: CheckpointSource, b: CheckpointSource, pattern: str, found: Differences) -> list[str]:
    """Fills in what differs in structure; returns the keys that don't."""
    ours, theirs = ({key for key in source.head.keys if fnmatchcase(key, pattern)} for source in (a, b))
    found.only_in_a, found.only_in_b = sorted(ours - theirs), sorted(theirs - ours)
    same = []
    for key in sorted(ours & theirs):
        left, right = a.head.keys[key], b.head.keys[key]
        if (left.dtype, left.shape) == (right.dtype, right.shape):
            same.append(key)
        else:
            found.structure[key] = _structure(left), _structure(right)
    return same


def _structure(entry: KeyEntry) -> str:
    return f"{entry.dtype} {list(entry.shape)}"


def _compare_tensors(
    a: CheckpointSource,
    b: CheckpointSource,
    keys: list[str],
    tolerance: Tolerance,
    found: Differences,
    progress: Progress,
) -> None:
    for group in batches(a, b, keys):
        ours, theirs = a.chunks(group), b.chunks(group)
        for key in group:
            unequal = compare_key(key, Side(a, ours[key]), Side(b, theirs[key]), tolerance, progress)
            found.compared += 1
            if unequal.elements:
                found.tensors[key] = unequal


def _compare_values(a: CheckpointSource, b: CheckpointSource, pattern: str, found: Differences) -> None:
    ours, theirs = dict(a.head.values), dict(b.head.values)
    if a.head.format != b.head.format:
        apart = sorted(ours.keys() ^ theirs.keys())
        if apart:
            found.notes.append(f"values that one of the formats does not have were not compared: {', '.join(apart)}")
        ours, theirs = ({name: side[name] for name in side if name not in apart} for side in (ours, theirs))
    left = flattened(ours, "values") | flattened(a.hyperparameters(), "hyperparameters")
    right = flattened(theirs, "values") | flattened(b.hyperparameters(), "hyperparameters")
    for name in sorted(left.keys() | right.keys()):
        if not fnmatchcase(name, pattern):
            continue
        if name not in left or name not in right or not same_value(left[name], right[name]):
            found.values[name] = _text(left, name), _text(right, name)


def _text(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name])[:200] if name in values else _ABSENT


def _as_data(places: list[AnyPath], found: Differences) -> dict[str, Any]:
    return {
        "a": str(places[0]),
        "b": str(places[1]),
        "equal": found.equal,
        "only_in_a": found.only_in_a,
        "only_in_b": found.only_in_b,
        "structure": {key: {"a": a, "b": b} for key, (a, b) in found.structure.items()},
        "tensors": {
            key: {
                "unequal": u.elements,
                "elements": u.total,
                "max_abs_difference": u.largest if math.isfinite(u.largest) else str(u.largest),
            }
            for key, u in found.tensors.items()
        },
        "values": {name: {"a": a, "b": b} for name, (a, b) in found.values.items()},
        "tensors_compared": found.compared,
        "notes": found.notes,
    }


def _show(places: list[AnyPath], found: Differences) -> None:
    say(f"A  {places[0]}")
    say(f"B  {places[1]}")
    for side, names in (("A", found.only_in_a), ("B", found.only_in_b)):
        if names:
            _head(f"Only in {side}: {len(names)}")
            for name in names:
                say(f"  {name}")
    for title, pairs in (("Other shape or dtype", found.structure), ("Other state", found.values)):
        if pairs:
            _head(f"{title}: {len(pairs)}")
            for name, (left, right) in pairs.items():
                say(f"  {name}")
                say(f"    A  {left}")
                say(f"    B  {right}")
    if found.tensors:
        _head(f"Other elements: {len(found.tensors)}")
        for key, unequal in found.tensors.items():
            say(f"  {key}")
            say(f"    {unequal.elements} of {unequal.total}, max |a - b| {unequal.largest:.6g}")
    say()
    for note in found.notes:
        say(f"Note: {note}.")
    say(f"Compared {found.compared} tensors.")
    say("Equal." if found.equal else "Different.", style="bold green" if found.equal else "bold red")


def _head(text: str) -> None:
    say()
    say(text, style="bold")
