# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`diff`: do two checkpoints hold the same, whatever layout and format they were saved in?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mbridge_fsdp_ckpt.io.progress_bar import progress_bar
from mbridge_fsdp_ckpt.tools.command.console import EXIT_CODES, AsJson, app, print_json, say
from mbridge_fsdp_ckpt.tools.command.places import checkpoint_at

if TYPE_CHECKING:
    from mbridge_fsdp_ckpt.io.store import AnyPath
    from mbridge_fsdp_ckpt.tools.diff import Differences


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
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints: keys, shapes, dtypes, tensors, and other state.

    Other state goes by the names values.* and hyperparameters.*; random-number states are not compared.
    """
    if not (math.isfinite(rtol) and math.isfinite(atol)):
        raise typer.BadParameter("a tolerance must be finite")
    from mbridge_fsdp_ckpt.tools.compare import Tolerance
    from mbridge_fsdp_ckpt.tools.diff import differences

    places = checkpoint_at(a), checkpoint_at(b)

    with progress_bar() as bar:
        found = differences(*places, Tolerance(rtol, atol), pattern=key, values=values, progress=bar)
    if as_json:
        print_json(_as_data(places, found))
    else:
        _show(places, found, "Equal." if values else "Keys, shapes and dtypes are equal.")
    if not found.equal:
        raise typer.Exit(1)


def _as_data(places: Sequence[AnyPath], found: Differences) -> dict[str, Any]:
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


def _show(places: Sequence[AnyPath], found: Differences, equal: str) -> None:
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
    say(equal if found.equal else "Different.", style="bold green" if found.equal else "bold red")


def _head(text: str) -> None:
    say()
    say(text, style="bold")
