# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The command's frame: options, exit codes and printing that all its subcommands share.

Exit codes: 0 done; 1 a named error of this package, printed to standard error, or damage or differences that were
found; 2 wrong usage, or a question that nobody is there to answer; 130 interrupted.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Column, Table
from rich.text import Text
from typer.core import TyperGroup

from mbridge_fsdp_ckpt import __version__
from mbridge_fsdp_ckpt.errors import CheckpointError, describe_unexpected
from mbridge_fsdp_ckpt.printable import printable
from mbridge_fsdp_ckpt.remedies import Frontend, through

EXIT_CODES = "Exit codes: 0 done; 1 a named error, damage or differences found; 2 wrong usage; 130 interrupted."


class _Group(TyperGroup):
    """Ends with exit code 1 and one line where a subcommand raises a named error, or the storage refuses."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with through(Frontend.COMMAND):
                return super().invoke(ctx)
        except CheckpointError as error:
            fail(error)
        except OSError as error:
            if error.errno == errno.EPIPE:  # whoever read the output has enough
                raise
            fail(describe_unexpected(error, rank=None, doing="working on the checkpoint"))


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Look at fsdp_dtensor_safe checkpoints, check them, compare them, and tidy up after them.",
    epilog=EXIT_CODES,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Checkpoint = Annotated[
    str, typer.Argument(help="An iteration directory, or the root of a run's checkpoints; a path or a URL.")
]
Root = Annotated[str, typer.Argument(help="The root of a run's checkpoints; a path or a URL.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"mbridge_fsdp_ckpt {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Take the options that stand before a subcommand."""


def fail(error: CheckpointError, code: int = 1) -> NoReturn:
    """Print a named error in one line, and end."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(as_text(f"{type(error).__name__}: {error}", "red"))
    raise typer.Exit(code)


def print_json(data: Any) -> None:
    """Print data for another program."""
    sys.stdout.write(json.dumps(data, indent=2) + "\n")


def say(text: str = "", style: str = "") -> None:
    """Print a line, never broken; what a checkpoint says in it is shown, and neither obeyed nor taken for markup."""
    Console(highlight=False).print(as_text(text, style), soft_wrap=True)


def as_text(text: str, style: str = "") -> Text:
    """Text for rich as it stands, in one line."""
    return Text(printable(text), style=style)


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print names with what they stand for, side by side."""
    grid = Table.grid("", Column(overflow="fold"), padding=(0, 3, 0, 0))
    for name, text in facts:
        grid.add_row(name, as_text(text))
    _print_columns(grid)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Print a table without borders; long text is folded, never cut.

    Args:
        headings: Of the columns.
        rows: Their text.
        right: Headings of columns of numbers.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        number = heading in right
        table.add_column(heading, overflow="fold", justify="right" if number else "left", no_wrap=number)
    for row in rows:
        table.add_row(*map(as_text, row))
    _print_columns(table)


def _print_columns(table: Table) -> None:
    console = Console(highlight=False)
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        sys.stdout.write(line.rstrip() + "\n")


def size_text(count: int) -> str:
    """Bytes for people: 1.2 MB."""
    return decimal(count)


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something is deleted.

    Raises:
        typer.BadParameter: Nobody is there to ask.
        typer.Exit: The answer was no.
    """
    if yes:
        return
    if not is_interactive():
        raise typer.BadParameter(f"no terminal to ask on: {question} Add --yes to do it, or look with --dry-run.")
    if not typer.confirm(question, err=True):
        say("Nothing was changed.")
        raise typer.Exit(1)


def is_interactive() -> bool:
    """Whether somebody can answer a question."""
    return sys.stdin.isatty()


def be_quiet() -> None:
    """What Megatron and its companions warn of concerns training."""
    import torch  # noqa: F401  (it sets its loggers' levels when it is imported: that must come first)

    warnings.simplefilter("ignore")
    quiet: Any = {"TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
    os.environ.update({name: value for name, value in quiet.items() if name not in os.environ})
    for name in ("megatron", "torch", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
