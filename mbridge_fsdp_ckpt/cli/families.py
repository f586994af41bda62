"""`families`: the families installed here, and what they split in a checkpoint."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Annotated, Any

import typer

from mbridge_fsdp_ckpt.cli.console import EXIT_CODES, Json, app, print_json, print_table, say
from mbridge_fsdp_ckpt.families import default_registry
from mbridge_fsdp_ckpt.hosts.root import find_checkpoint
from mbridge_fsdp_ckpt.plan.keys import MODEL_PREFIX
from mbridge_fsdp_ckpt.storage.opening import open_checkpoint
from mbridge_fsdp_ckpt.storage.source import CheckpointSource
from mbridge_fsdp_ckpt.storage.store import as_path


@app.command(epilog=EXIT_CODES)
def families(
    checkpoint: Annotated[
        str | None, typer.Argument(help="An iteration directory, or the root of a run's checkpoints.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the installed model families, or the parameters that each claimed in a checkpoint's model."""
    if checkpoint is None:
        _show_installed(_installed(), as_json)
        return
    source = open_checkpoint(find_checkpoint(as_path(checkpoint)))
    claimed = _claimed(source)
    if as_json:
        print_json(claimed)
        return
    _show_claimed(claimed)


def _installed() -> list[dict[str, Any]]:
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


def _claimed(source: CheckpointSource) -> dict[str, dict[str, list[str]]]:
    """For each family, its parameters with their components; parameters that are whole count for none."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for key, entry in source.head.keys.items():
        if entry.family is not None and key.startswith(MODEL_PREFIX):
            parameter = re.sub(rf"[._]{re.escape(entry.component)}$", "", key.removeprefix(MODEL_PREFIX))
            found[entry.family][parameter].append(entry.component)
    return {family: dict(parameters) for family, parameters in sorted(found.items())}


def _show_claimed(claimed: dict[str, dict[str, list[str]]]) -> None:
    if not claimed:
        say("No parameter of this model is fused.")
        return
    rows = []
    for family, parameters in claimed.items():
        for parameter, components in parameters.items():
            rows.append((family, parameter, " ".join(components)))
    print_table(("family", "parameter", "components"), rows)
