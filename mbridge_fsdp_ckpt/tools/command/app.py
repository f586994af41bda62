# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The command, with all its subcommands."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def application() -> typer.Typer:
    """The Typer application, with every subcommand registered."""
    from mbridge_fsdp_ckpt.tools.command import (  # noqa: F401
        convert,
        diff,
        estimate,
        families,
        inspect,
        prune,
        repair,
        run,
        timeline,
        verify,
    )
    from mbridge_fsdp_ckpt.tools.command.console import app

    return app


def main() -> None:
    """Run the command."""
    try:
        application()()
    except KeyboardInterrupt:  # during the imports; afterwards Typer's own handling comes first
        sys.exit(130)
