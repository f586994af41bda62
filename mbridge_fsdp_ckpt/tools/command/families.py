# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`families`: the families installed here, and what they split in a checkpoint."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mbridge_fsdp_ckpt.tools.command.console import EXIT_CODES, AsJson, app, print_json, print_table, say
from mbridge_fsdp_ckpt.tools.command.places import checkpoint_at


@app.command(epilog=EXIT_CODES)
def families(
    checkpoint: Annotated[
        str | None, typer.Argument(help="An iteration directory, or the root of a run's checkpoints.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the installed model families, or the parameters that each claimed in a checkpoint's model."""
    if checkpoint is None:
        _show_installed(_installed(), as_json)
        return
    from mbridge_fsdp_ckpt.tools.survey import families_of

    claimed = families_of(checkpoint_at(checkpoint))
    if as_json:
        print_json(claimed)
        return
    _show_claimed(claimed)


def _installed() -> list[dict[str, Any]]:
    from mbridge_fsdp_ckpt.families import default_registry

    registry = default_registry()
    return [
        {"family": name, "version": registry.family(name).version, "class": registry.origin(name)}
        for name in registry.names
    ]


def _show_installed(found: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    print_table(("family", "version", "class"), [(r["family"], str(r["version"]), r["class"]) for r in found])


def _show_claimed(claimed: dict[str, dict[str, list[str]]]) -> None:
    if not claimed:
        say("No parameter of this model is fused.")
        return
    rows = []
    for family, parameters in claimed.items():
        for parameter, components in parameters.items():
            rows.append((family, parameter, " ".join(components)))
    print_table(("family", "parameter", "components"), rows)
