# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The command, with all its subcommands."""

from __future__ import annotations

import sys
from importlib.util import find_spec
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


def _is_missing(package: str) -> bool:
    return find_spec(package) is None


def main() -> None:
    """Run the command."""
    if (missing := next(filter(_is_missing, ("typer", "rich")), None)) is not None:
        sys.exit(f"The command needs {missing}: pip install 'mbridge-fsdp-ckpt[tools]'")
    try:
        application()()
    except KeyboardInterrupt:  # during the imports; afterwards Typer's own handling comes first
        sys.exit(130)
