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
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="The script and its arguments.")],
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module.")] = False,
    takeover: Annotated[
        bool,
        typer.Option("--takeover", help="Let this package save and load runs that name the format fsdp_dtensor, too."),
    ] = False,
) -> None:
    """Run an unmodified script with the format registered in Megatron-Bridge or Megatron-LM.

    Where an option of the script accepts fsdp_dtensor, it accepts fsdp_dtensor_safe, too, which has the effect of
    --takeover. Under torchrun: torchrun ... -m mbridge_fsdp_ckpt run SCRIPT ARGS
    """
    script, *arguments = command
    if not module and not Path(script).is_file():
        raise typer.BadParameter(f"no such file: {script}", param_hint="SCRIPT")
    with inside(None):
        execute(script, arguments, is_module=module, take_over=_register(takeover))


def execute(
    script: str, arguments: list[str], *, is_module: bool = False, take_over: Callable[[], object] = lambda: None
) -> None:
    """Run a script or module as `__main__`, with its own `sys.argv`, `sys.path[0]` and exception hook.

    Args:
        script: The script's file, or the module's name.
        arguments: The script's arguments.
        is_module: Whether `script` is the name of a module.
        take_over: Called when an option of the script itself, not of Megatron, is given this format's name.

    Raises:
        SystemExit: With the script's exit code, if it ended with one, or by an exception, whose traceback was shown.
    """
    container: Any = argparse._ActionsContainer
    container.add_argument = _wrap_add_argument(container.add_argument, take_over)
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
    """Register the format in Megatron-Bridge and Megatron-LM, each once the script imports it.

    Args:
        takeover: Whether to take over runs that name the format fsdp_dtensor.  If not, the environment variable
            MBRIDGE_FSDP_CKPT_TAKEOVER says so.

    Returns:
        A function that takes such runs over from its call on; called while the script parses its options.
    """
    from mbridge_fsdp_ckpt.integrations import bridge, megatron_lm
    from mbridge_fsdp_ckpt.integrations.common.after_import import AfterImport

    takes_over, bridge_is_registered = takeover, False

    def register_bridge(_: ModuleType) -> None:
        nonlocal bridge_is_registered
        bridge.register(takeover=takes_over or None)
        bridge_is_registered = True

    def take_over() -> None:
        nonlocal takes_over
        takes_over = True
        megatron_lm.register(takeover=True)
        if bridge_is_registered:
            bridge.register(takeover=True)

    AfterImport({"megatron.bridge": register_bridge}).install()
    megatron_lm.register(takeover=takeover or None)
    return take_over


def _run_file(file: str) -> None:
    main: Any = types.ModuleType("__main__")
    main.__file__, main.__builtins__ = file, builtins
    sys.modules["__main__"] = main
    with io.open_code(file) as source:
        code = compile(source.read(), file, "exec")
    exec(code, main.__dict__)


def _wrap_add_argument(original: Callable[..., Any], take_over: Callable[[], object]) -> Callable[..., Any]:
    """Wrap argparse's `add_argument` to add this format's name wherever the stock format is a choice.

    The script may compare the value with the stock name.  So where an option of the script itself is given our name,
    the script gets the stock name, and `take_over` makes this package save and load under it.  Megatron's own options
    keep our name, which the plug-ins know.
    """

    @functools.wraps(original)
    def add_argument(self: Any, *args: Any, **kwargs: Any) -> Any:
        action = original(self, *args, **kwargs)
        choices = action.choices
        if (
            isinstance(choices, list | tuple | set | frozenset)
            and STOCK_FORMAT in choices
            and FORMAT_NAME not in choices
        ):
            action.choices = type(choices)((*choices, FORMAT_NAME))
            if not sys._getframe(1).f_globals.get("__name__", "").startswith("megatron."):
                action.type = _stock_name_for_ours(action.type, take_over)
        return action

    return add_argument


def _stock_name_for_ours(original: Any, take_over: Callable[[], object]) -> Callable[[str], Any]:
    """Wrap an option's `type` to call `take_over` and return the stock name where it is given this format's name."""

    def value(text: str) -> Any:
        if text == FORMAT_NAME:
            take_over()
            text = STOCK_FORMAT
        return text if original is None else original(text)

    return value if original is None else functools.wraps(original)(value)


def _end_as_python_would(error: BaseException, code: int) -> NoReturn:
    """Print the traceback from the script's first frame on, and exit with the code."""
    sys.excepthook(type(error), error, error.with_traceback(_from_script(error.__traceback__)).__traceback__)
    raise SystemExit(code)


def _from_script(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without the frames of this module and of runpy."""
    inside = trace
    while inside is not None and _is_ours(inside.tb_frame.f_code.co_filename):
        inside = inside.tb_next
    return inside


def _is_ours(file: str) -> bool:
    return file == __file__ or "runpy" in file
