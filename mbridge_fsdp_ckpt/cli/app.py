"""The command, with all its subcommands."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command."""
    try:
        from mbridge_fsdp_ckpt.cli import (  # noqa: F401
            convert,
            diff,
            families,
            inspect,
            prune,
            rehearse,
            repair,
            run,
            timeline,
            verify,
        )
        from mbridge_fsdp_ckpt.cli.console import app

        app()
    except KeyboardInterrupt:  # during the imports; afterwards Typer's own handling comes first
        sys.exit(130)
