"""How ranks run a script of examples/: as torchrun would, with `__main__` as its name."""

from __future__ import annotations

import io
import re
import runpy
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from mbridge_fsdp_ckpt.testing.kernels import replace_cuda_only_kernels
from mbridge_fsdp_ckpt.testing.ranks import no_process_group
from tests.mock_data import fewer_documents
from tests.recipes.kernels import torch_kernels

EXAMPLES = Path(__file__).parents[2] / "examples"
LOSS = re.compile(r"(?:step|iteration) +(\d+)\b.*? loss:? ([0-9.Ee+-]+)")


@dataclass(frozen=True)
class Script:
    """One start of a script.

    Args:
        name: Its file.
        directory: Its checkpoints.
        arguments: Its command line.
        te_modules: Whether it trains Transformer Engine's modules, whose kernels need CUDA.
    """

    name: str
    directory: str
    arguments: tuple[str, ...]
    te_modules: bool = False


@no_process_group
def run(script: Script) -> dict[int, str]:
    """Run it; the losses that this rank printed, by step."""
    fewer_documents()
    replace_cuda_only_kernels()
    printed = io.StringIO()
    with (
        torch_kernels() if script.te_modules else nullcontext(),
        patch.object(sys, "argv", [script.name, *script.arguments]),
        patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
        patch.dict(sys.modules),
        redirect_stdout(printed),
    ):
        runpy.run_path(str(EXAMPLES / script.name), run_name="__main__")
    return {int(step): loss for step, loss in LOSS.findall(printed.getvalue())}
