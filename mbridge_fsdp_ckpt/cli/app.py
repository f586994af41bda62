"""The command's frame: options and exit codes that all its subcommands share.

Exit codes: 0 done; 1 a named error of this package, printed to standard error; 2 wrong usage.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from mbridge_fsdp_ckpt.errors import CheckpointError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Look at fsdp_dtensor_safe checkpoints.  Exit codes: 0 done, 1 a named error, 2 wrong usage.",
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@app.callback()
def _root() -> None:
    """Keep subcommands even while there is only one."""


def main() -> None:
    """Run the command; a named error ends it with exit code 1."""
    from mbridge_fsdp_ckpt.cli import families  # noqa: F401 - adds its subcommand

    try:
        app()
    except CheckpointError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(
            f"{type(error).__name__}: {error}", markup=False, style="red"
        )
        sys.exit(1)


def print_json(data: Any) -> None:
    """Print data for another program."""
    sys.stdout.write(json.dumps(data, indent=2) + "\n")
