# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`run`: an unmodified script, with the format registered.

The script runs in this process as `python SCRIPT ARGS` would run it: `sys.argv`, `sys.path[0]`, `__main__`, exit code
and traceback are its own.
"""

from __future__ import annotations

import argparse
import builtins
import functools
import io
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NoReturn

import typer

from mbridge_fsdp_ckpt.format.names import FORMAT_NAME, STOCK_FORMAT
from mbridge_fsdp_ckpt.remedies import inside
from mbridge_fsdp_ckpt.tools.command.console import EXIT_CODES, app


@app.command(
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
    epilog=EXIT_CODES,
    options_metavar="[OPTIONS]",
)
def run(
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="The script, and what it is given.")],
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module.")] = False,
    takeover: Annotated[
        bool, typer.Option("--takeover", help="Save and load here, too, where the script says fsdp_dtensor.")
    ] = False,
) -> None:
    """Run an unmodified script with the format registered in Megatron-Bridge or Megatron-LM.

    An option of the script that may be fsdp_dtensor may be fsdp_dtensor_safe, too, which is a takeover. Under torchrun:
    torchrun ... -m mbridge_fsdp_ckpt run SCRIPT ARGS
    """
    script, *arguments = command
    if not module and not Path(script).is_file():
        raise typer.BadParameter(f"no such file: {script}", param_hint="SCRIPT")
    with inside(None):
        execute(script, arguments, is_module=module, take_over=_register(takeover))


def execute(
    script: str, arguments: list[str], *, is_module: bool = False, take_over: Callable[[], object] = lambda: None
) -> None:
    """Run a script or module as `__main__`; the process is its own from then on.

    Args:
        script: File, or name of a module.
        arguments: The script's.
        is_module: Whether it is a module's name.
        take_over: Called when an option of the script's own is given this format's name.

    Raises:
        SystemExit: With the script's exit code, if it ended with one, or by an exception, whose traceback was shown.
    """
    container: Any = argparse._ActionsContainer
    container.add_argument = _widening(container.add_argument, take_over)
    sys.path[0] = str(Path.cwd() if is_module else Path(script).resolve().parent)
    sys.argv = ["-m" if is_module else script, *arguments]
    sys.excepthook = sys.__excepthook__
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            _run_file(str(Path(script).absolute()))
    except Exception as error:
        _end_as_python_would(error, 1)
    except KeyboardInterrupt as error:
        _end_as_python_would(error, 130)


def _register(takeover: bool) -> Callable[[], None]:
    """Have the format registered in what the script imports, as soon as it does; the result asks for a takeover."""
    from mbridge_fsdp_ckpt.integrations import bridge, megatron_lm
    from mbridge_fsdp_ckpt.integrations.common.after_import import AfterImport

    asked, registered = [takeover], list[ModuleType]()

    def register(module: ModuleType) -> None:
        bridge.register(takeover=asked[0] or None)
        registered.append(module)

    def take_over() -> None:
        asked[0] = True
        if registered:
            bridge.register(takeover=True)

    AfterImport({"megatron.bridge": register}).install()
    megatron_lm.register()
    return take_over


def _run_file(file: str) -> None:
    main: Any = types.ModuleType("__main__")
    main.__file__, main.__builtins__ = file, builtins
    sys.modules["__main__"] = main
    with io.open_code(file) as source:
        code = compile(source.read(), file, "exec")
    exec(code, main.__dict__)


def _widening(stock: Callable[..., Any], take_over: Callable[[], object]) -> Callable[..., Any]:
    """Let options that may be the stock format be this one, too.

    A script compares names.  Given ours, an option of its own gets stock's, so that every branch of stock's name
    is taken; that name is then this implementation.  Megatron's own options keep ours: the plug-in knows it.
    """

    @functools.wraps(stock)
    def add_argument(self: Any, *args: Any, **kwargs: Any) -> Any:
        action = stock(self, *args, **kwargs)
        choices = action.choices
        if (
            isinstance(choices, list | tuple | set | frozenset)
            and STOCK_FORMAT in choices
            and FORMAT_NAME not in choices
        ):
            action.choices = type(choices)((*choices, FORMAT_NAME))
            if not sys._getframe(1).f_globals.get("__name__", "").startswith("megatron."):
                action.type = _as_stock(action.type, take_over)
        return action

    return add_argument


def _as_stock(stock: Any, take_over: Callable[[], object]) -> Callable[[str], Any]:
    """What turns an argument's text into its value, with stock's name for ours."""

    def value(text: str) -> Any:
        if text == FORMAT_NAME:
            take_over()
            text = STOCK_FORMAT
        return text if stock is None else stock(text)

    return value if stock is None else functools.wraps(stock)(value)


def _end_as_python_would(error: BaseException, code: int) -> NoReturn:
    """Show the traceback from the script's first frame on."""
    sys.excepthook(type(error), error, error.with_traceback(_from_script(error.__traceback__)).__traceback__)
    raise SystemExit(code)


def _from_script(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Without the frames of this module and of runpy."""
    inside = trace
    while inside is not None and _is_ours(inside.tb_frame.f_code.co_filename):
        inside = inside.tb_next
    return inside


def _is_ours(file: str) -> bool:
    return file == __file__ or "runpy" in file
