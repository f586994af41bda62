# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""How ranks run a script of examples/, as torchrun would, and the snippets of README.md."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from testing.kernels import replace_cuda_only_kernels
from testing.ranks import no_process_group
from tests.mock_data import fewer_documents
from tests.recipes.kernels import torch_kernels

EXAMPLES = Path(__file__).parents[2] / "examples"
README = EXAMPLES.parent / "README.md"
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


@contextmanager
def on_cpu_ranks(*, te_modules: bool) -> Iterator[None]:
    """A block in which the examples can be imported, and run."""
    fewer_documents()
    replace_cuda_only_kernels()
    with (
        torch_kernels() if te_modules else nullcontext(),
        patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
        patch.dict(sys.modules),
    ):
        yield


@no_process_group
def run(script: Script) -> dict[int, str]:
    """Run it; the losses that this rank printed, by step."""
    command = [script.name, *script.arguments]
    with on_cpu_ranks(te_modules=script.te_modules), patch.object(sys, "argv", command), printed() as text:
        runpy.run_path(str(EXAMPLES / script.name), run_name="__main__")
    return losses(text.getvalue())


def snippets() -> list[str]:
    """The Python of README.md: Megatron-Bridge, a loop of one's own, asynchronous."""
    return re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)


@no_process_group
def bridge_snippet(script: Script) -> dict[int, str]:
    """Run README's first snippet with the configuration of a script; the losses, as above."""
    with on_cpu_ranks(te_modules=True), printed() as text:
        from megatron.bridge.training.gpt_step import forward_step
        from megatron.bridge.training.pretrain import pretrain
        from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

        config = runpy.run_path(str(EXAMPLES / script.name))["configuration"]()
        process_config_with_overrides(config, cli_overrides=list(script.arguments))
        config.ddp.use_megatron_fsdp, config.checkpoint.ckpt_format = False, "torch_dist"
        exec(snippets()[0], {"config": config, "pretrain": pretrain, "forward_step": forward_step})
    return losses(text.getvalue())


def native_snippets(directory: str) -> tuple[int, bool]:
    """Run the others; the iteration that was loaded, and whether the second one's last call waited for its save."""
    with on_cpu_ranks(te_modules=False), contextlib.chdir(directory):
        from training import Job  # type: ignore[import-not-found, unused-ignore]

        job = Job()
        job.step(0)
        names = {"model": job.model, "optimizer": job.optimizer}
        native, beside = snippets()[1:]
        exec(native, names)
        exec(beside, names)
        return names["iteration"], Path("checkpoints/iter_0000020/manifest.json").exists()


@contextmanager
def printed() -> Iterator[io.StringIO]:
    """What is printed in the block."""
    with redirect_stdout(io.StringIO()) as text:
        yield text


def losses(text: str) -> dict[int, str]:
    """By step, as they were printed."""
    return {int(step): loss for step, loss in LOSS.findall(text)}
