# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What the tests of conversion do on every rank, and what they compare."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.format.names import FORMAT_NAME
from testing.kernels import let_mamba_be_built
from testing.ranks import no_process_group
from tests.models import hugging_face
from tests.models.imported import gloo_gathers_uneven, is_supported
from tests.models.tiny import VOCABULARY

SCRIPT = Path(__file__).with_name("upstream_script.py")


def write_model(name: str, directory: str) -> bool:
    """Write a tiny Hugging Face model with a tokenizer; whether Bridge knows it."""
    hugging_face.write(name, directory)
    write_tokenizer(directory)
    return is_supported(directory)


def write_tokenizer(directory: str) -> None:
    """A tokenizer whose tokens are numbers."""
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(VOCABULARY)}
    file = Path(directory) / "tokenizer.json"
    file.write_text(json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": words, "unk_token": "0"}}))
    PreTrainedTokenizerFast(tokenizer_file=str(file), unk_token="0", eos_token="1").save_pretrained(directory)


def convert_every_way(source: str, folder: str, sizes: list[str]) -> None:
    """The script imports, and exports what the command imported; the command the other way round.

    The script runs as on CUDA, the command as on a machine without.
    """
    let_mamba_be_built()
    by_script, by_command = f"{folder}/by_script", f"{folder}/by_command"
    script("import", source, by_script, *sizes)
    with without_cuda():
        command("import", source, by_command, *sizes)
        command("export", source, by_script, *sizes, "--hf-path", f"{folder}/script_command", "--no-progress")
    script("export", source, by_command, *sizes, "--hf-path", f"{folder}/command_script")
    with saved_before():
        script("export", source, by_command, *sizes, "--hf-path", f"{folder}/command_script_sharded")
    script("export", source, by_script, *sizes, "--hf-path", f"{folder}/script_unwrapped", named="torch_dist")


def convert_without_cuda(source: str, folder: str, sizes: list[str]) -> None:
    """The command imports and exports, as on a machine without CUDA."""
    with without_cuda():
        command("import", source, f"{folder}/checkpoint", *sizes)
        command("export", source, f"{folder}/checkpoint", *sizes, "--hf-path", f"{folder}/exported", "--no-progress")


@no_process_group
def exported_by_a_job_of_its_own(source: str, checkpoint: str, folder: str, named: str, sizes: list[str]) -> None:
    """The script exports, in ranks that torchrun started and that have joined nothing yet."""
    join = dist.init_process_group

    def over_gloo(*args: Any, **kwargs: Any) -> None:
        join("gloo")

    with patch.object(dist, "init_process_group", over_gloo):
        script("export", source, checkpoint, "--hf-path", folder, *sizes, named=named)


def script(verb: str, source: str, checkpoint: str, *arguments: str, named: str = FORMAT_NAME) -> None:
    """Run the script under `mbridge_fsdp_ckpt run`, in this process; a takeover ends with it."""
    from mbridge_fsdp_ckpt.integrations import megatron_lm
    from mbridge_fsdp_ckpt.tools.command.run import run

    with begun_anew(), gloo_gathers_uneven():
        line = ["--hf-model", source, "--megatron-path", checkpoint, "--ckpt-format", named, *arguments]
        try:
            run([str(SCRIPT), verb, *line])
        finally:
            mbridge_fsdp_ckpt.register(takeover=False)
            megatron_lm.register(takeover=False)


def command(verb: str, source: str, checkpoint: str, *arguments: str) -> None:
    """Run `mbridge_fsdp_ckpt convert`, in this process."""
    from typer.main import get_command

    from mbridge_fsdp_ckpt.tools.command import convert

    line = [verb, "--hf-model", source, "--megatron-path", checkpoint, *arguments]
    with begun_anew():
        code = get_command(convert.app).main(line, standalone_mode=False)
        assert code in (None, 0), code


@contextmanager
def saved_before() -> Iterator[None]:
    """Exports find the model as a save leaves it: Megatron-FSDP's sharded parameters in the place of whole ones."""
    from megatron.bridge import AutoBridge

    export = AutoBridge.save_hf_pretrained

    def after_save(self: Any, model: list[Any], *args: Any, **kwargs: Any) -> None:
        model[0].module.state_dict()
        export(self, model, *args, **kwargs)

    with patch.object(AutoBridge, "save_hf_pretrained", after_save):
        yield


@contextmanager
def begun_anew() -> Iterator[None]:
    """A process that ran nothing yet, as far as Megatron, Python's start and its arguments go."""
    from megatron.core import parallel_state

    kept = sys.argv, list(sys.path), sys.modules["__main__"], sys.excepthook
    container: Any = argparse._ActionsContainer
    add_argument = container.add_argument
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"], sys.excepthook = kept
        container.add_argument = add_argument
        parallel_state.destroy_model_parallel()


@contextmanager
def without_cuda() -> Iterator[None]:
    """The machine as it is: nothing stands in for CUDA."""
    from testing import cpu_cuda

    cpu_cuda.install().uninstall()
    assert not torch.cuda.is_available()
    try:
        yield
    finally:
        cpu_cuda.install()


def differences(original: str, exported: str, *, exact: bool) -> list[str]:
    """What differs between two models' tensors.

    Args:
        original: A directory.
        exported: Another.
        exact: Whether types count; if not, values alone do.
    """
    from safetensors.torch import load_file

    ours, theirs = (load_file(str(Path(folder) / "model.safetensors")) for folder in (exported, original))
    found = [f"not exported: {name}" for name in sorted(theirs.keys() - ours.keys())]
    found += [f"exported besides: {name}" for name in sorted(ours.keys() - theirs.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        one, other = ours[name], theirs[name]
        if one.shape != other.shape:
            found.append(f"shape: {name}")
        elif exact and one.dtype != other.dtype:
            found.append(f"type {one.dtype}: {name}")
        elif not (torch.equal(_bits(one), _bits(other)) if exact else torch.equal(one.float(), other.float())):
            found.append(f"values: {name}")
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def logits(name: str, directory: str) -> torch.Tensor:
    """What `transformers` computes from a model, in float32, for 8 tokens."""
    import transformers

    architecture = getattr(transformers, hugging_face.MODELS[name].architecture)
    model = architecture.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = torch.arange(8)[None] * 5 % VOCABULARY
    with torch.no_grad():
        computed: torch.Tensor = model(input_ids=tokens).logits
    return computed


def same_logits(name: str, original: str, exported: list[str]) -> list[bool]:
    """Whether each exported model computes what the original does."""
    expected = logits(name, original)
    assert expected.isfinite().all()
    assert expected.std() > 0
    return [torch.equal(logits(name, folder), expected) for folder in exported]


def tokens_of(directory: Path) -> dict[str, int]:
    """A tokenizer's vocabulary."""
    words: dict[str, int] = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    return words
