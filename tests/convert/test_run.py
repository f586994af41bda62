# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`mbridge_fsdp_ckpt run`: a script runs as Python would run it, and finds the format registered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mbridge_fsdp_ckpt.tools.command import run as _run  # noqa: F401 - the subcommand
from mbridge_fsdp_ckpt.tools.command.console import app

SCRIPT = """
import argparse, sys
parser = argparse.ArgumentParser()
parser.add_argument("--ckpt-format", choices=["torch_dist", "fsdp_dtensor"], default="fsdp_dtensor")
parser.add_argument("--end", default="")
args, rest = parser.parse_known_args()
print(__name__, __file__, sys.argv, sys.path[0], args.end, rest, sys.modules["__main__"].__dict__ is globals())

def fail():
    raise ValueError("of the script")

if args.end == "raise":
    fail()
if args.end == "interrupt":
    raise KeyboardInterrupt
if args.end.isdecimal():
    sys.exit(int(args.end))
if args.end == "text":
    sys.exit("the last words")
"""

IN_BRIDGE = """
import argparse, os, time
parser = argparse.ArgumentParser()
parser.add_argument("--ckpt-format", choices=("fsdp_dtensor",))
args = parser.parse_args()
from megatron.bridge.training import checkpointing
from megatron.bridge.training.config import CheckpointConfig
assert CheckpointConfig(ckpt_format=args.ckpt_format)
from mbridge_fsdp_ckpt.integrations.bridge.choice import is_ours
routed = hasattr(checkpointing.save_checkpoint, "__wrapped__") and is_ours(args.ckpt_format)
os.write(1, f"RANK {os.environ['RANK']} {args.ckpt_format} {routed}\\n".encode())  # in one piece
if os.environ["RANK"] == "0":
    open("rank 0 is through", "x")
else:
    while not os.path.exists("rank 0 is through"):  # whoever ends with an error has the others killed
        time.sleep(0.05)
    raise SystemExit(7)
"""


def python(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "80", "NO_COLOR": "1", "PYTHON_COLORS": "0"}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        check=False,
        timeout=280,
    )


def ours(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return python("-m", "mbridge_fsdp_ckpt", "run", *arguments, folder=folder)


def executed(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Without the command's frame, which takes seconds to be imported."""
    begin = "import sys; from mbridge_fsdp_ckpt.tools.command.run import execute; _, *command = sys.argv; "
    call = (
        "execute(command[1], command[2:], is_module=True)" if command[0] == "-m" else "execute(command[0], command[1:])"
    )
    return python("-c", begin + call, *command, folder=folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "jobs" / "package").mkdir(parents=True)
    (tmp_path / "jobs" / "script.py").write_text(SCRIPT)
    (tmp_path / "jobs" / "package" / "__main__.py").write_text(SCRIPT)
    (tmp_path / "jobs" / "broken.py").write_text("def f(:\n")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("jobs/script.py",), 0),
        (("jobs/script.py", "--unknown", "-m", "x"), 0),
        (("jobs/script.py", "--end", "raise"), 1),
        (("jobs/script.py", "--end", "7"), 7),
        (("jobs/script.py", "--end", "text"), 1),
        (("jobs/broken.py",), 1),
        (("-m", "jobs.script", "--end", "3"), 3),
        (("-m", "jobs.package"), 0),
    ],
    ids=str,
)
def test_a_script_runs_as_python_runs_it(command: tuple[str, ...], code: int, folder: Path) -> None:
    plain, run = python(*command, folder=folder), executed(*command, folder=folder)
    assert (plain.returncode, run.returncode) == (code, code)
    assert run.stdout == plain.stdout
    assert _without_runpy(run.stderr) == _without_runpy(plain.stderr)


def _without_runpy(text: str) -> list[str]:
    """Python shows its own frames of `runpy` for modules."""
    return [line for line in text.splitlines() if "<frozen runpy>" not in line]


def test_an_interrupted_script_ends_like_one(folder: Path) -> None:
    run = executed("jobs/script.py", "--end", "interrupt", folder=folder)
    assert run.returncode == 130
    assert run.stderr.splitlines()[-1] == "KeyboardInterrupt"


def test_help_after_the_script_is_the_scripts(folder: Path) -> None:
    run = ours("jobs/script.py", "--help", folder=folder)
    assert run.returncode == 0
    assert "--ckpt-format {torch_dist,fsdp_dtensor,fsdp_dtensor_safe}" in run.stdout


def test_choices_that_lack_the_stock_format_stay(folder: Path) -> None:
    (folder / "script.py").write_text(
        "import argparse\n"
        "parser = argparse.ArgumentParser()\n"
        "group = parser.add_argument_group('formats')\n"
        "first = group.add_argument('--a', choices={'fsdp_dtensor'})\n"
        "second = parser.add_argument('--b', choices=['torch'])\n"
        "third = parser.add_argument('--c', choices=range(3))\n"
        "print(sorted(first.choices), second.choices, third.choices)\n"
    )
    assert executed("script.py", folder=folder).stdout == (
        "['fsdp_dtensor', 'fsdp_dtensor_safe'] ['torch'] range(0, 3)\n"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("none.py",), "no such file: none.py"),
        (("jobs",), "no such file: jobs"),
        ((), "Missing argument"),
        (("--nothing", "x.py"), "No such option: --nothing"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], says: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, ["run", *arguments], env={"COLUMNS": "80"})
    assert result.exit_code == 2
    assert says in result.output


@pytest.mark.bridge
def test_bridge_has_the_format_when_the_script_imports_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(IN_BRIDGE)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = ("-m", "mbridge_fsdp_ckpt", "run", "script.py", "--ckpt-format", "fsdp_dtensor_safe")
    run = python(*launcher, *command, folder=tmp_path)
    for rank in (0, 1):
        assert f"RANK {rank} fsdp_dtensor True" in run.stdout, run.stderr[-3000:]
    assert "exitcode  : 7" in run.stderr
