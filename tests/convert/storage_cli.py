# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The commands that convert on disk, as a user types them, and what must hold of what they leave behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner, Result

from mbridge_fsdp_ckpt.tools.command import console as frame
from mbridge_fsdp_ckpt.tools.command import convert_on_disk

app = typer.Typer(cls=frame._Group)
for _name, _function in (
    ("from-stock", convert_on_disk.from_stock),
    ("to-stock", convert_on_disk.to_stock),
    ("reshard", convert_on_disk.reshard),
    ("from-torch-dist", convert_on_disk.from_torch_dist),
):
    app.command(_name)(_function)


def call(*arguments: Any, columns: int = 80) -> Result:
    """A command in this process."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": str(columns)})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def data(*arguments: Any) -> Any:
    """What it prints with --json."""
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refusal(*arguments: Any) -> str:
    """What it says on standard error where it ends with a named error."""
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    return result.stderr


def left(root: Path) -> list[str]:
    """What is below a root, hidden or not."""
    return sorted(path.name for path in root.iterdir())
