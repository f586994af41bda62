# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Importing the package, or asking the command for help, is quick and pulls in neither torch nor a framework."""

import json
import subprocess
import sys

from mbridge_fsdp_ckpt import __version__
from tests.unit.test_cli import CONVERT_SURFACE, SURFACE

VERSION = f"mbridge_fsdp_ckpt {__version__}\n"
HEAVY = ("torch", "numpy", "megatron", "transformer_engine", "verl", "omegaconf")


def test_import_loads_no_framework() -> None:
    program = f"import sys, mbridge_fsdp_ckpt; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_help_of_every_command_and_the_version_load_no_framework() -> None:
    commands = [[], *([name] for name in SURFACE), *(["convert", name] for name in CONVERT_SURFACE)]
    asked = [["--version"], *([*words, "--help"] for words in commands)]
    program = f"""
import io, json, sys
from contextlib import redirect_stdout
from mbridge_fsdp_ckpt.tools.command.app import main
found = []
for words in {asked}:
    sys.argv = ["mbridge_fsdp_ckpt", *words]
    with redirect_stdout(io.StringIO()) as shown:
        try:
            main()
        except SystemExit as end:
            code = end.code
    loaded = [name for name in {(*HEAVY, "upath", "jinja2")} if name in sys.modules]
    found.append([words, code, "Exit codes" in shown.getvalue(), shown.getvalue() == {VERSION!r}, loaded])
print(json.dumps(found))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    expected = [[["--version"], 0, False, True, []], *([words, 0, True, False, []] for words in asked[1:])]
    assert json.loads(done.stdout) == expected


def test_a_writer_beside_a_trainer_loads_no_more_than_it_needs() -> None:
    """There is one beside each trainer of a node, and rank 0's alone writes DCP metadata."""
    unneeded = ("torch.distributed.checkpoint", "torch.distributed.tensor", "megatron", "transformer_engine")
    module = "mbridge_fsdp_ckpt.saving.background.checkpoint_main"
    program = f"import sys, {module}; print([name for name in {unneeded} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_names_are_found_where_they_live() -> None:
    import mbridge_fsdp_ckpt
    from mbridge_fsdp_ckpt import checkpoint
    from mbridge_fsdp_ckpt.integrations import bridge

    names = set(mbridge_fsdp_ckpt.__all__) - {"FORMAT_NAME", "STOCK_FORMAT", "__version__"}
    assert names == {*checkpoint.__all__, *bridge.__all__}
    assert all(getattr(mbridge_fsdp_ckpt, name) is getattr(checkpoint, name) for name in checkpoint.__all__)
