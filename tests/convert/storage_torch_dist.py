# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Checkpoints in Megatron's format torch_dist, by Bridge's own training and saving; what they hold, read by torch."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from mbridge_fsdp_ckpt.integrations.bridge.process_group import process_group_for_conversion
from mbridge_fsdp_ckpt.tools.convert import hugging_face
from testing.bridge import attention_layers, mixed_layers
from testing.kernels import let_mamba_be_built, replace_cuda_only_kernels
from testing.ranks import no_process_group
from tests.bridge.training import Run, configuration
from tests.convert.hugging_face_runs import begun_anew, without_cuda, write_model
from tests.convert.storage_cli import data
from tests.mock_data import fewer_documents
from tests.models.imported import is_supported

NORMS = {"linear_qkv.layer_norm_": "input_layernorm.", "linear_fc1.layer_norm_": "pre_mlp_layernorm."}
OPTIMIZER = "optimizer.state."


def mixed(config: Any) -> Any:
    """Layers of Gated DeltaNet and of attention."""
    return mixed_layers(config)


def alike(config: Any) -> Any:
    """Layers of attention alone: torch_dist stacks them."""
    return attention_layers(config)


@no_process_group
def train(run: Run, *, stacked: bool = False) -> None:
    """Train without Megatron-FSDP, with Megatron's distributed optimizer, and save in torch_dist."""
    from megatron.bridge.training import pretrain as bridge_pretrain
    from megatron.bridge.training.gpt_step import forward_step

    replace_cuda_only_kernels()
    fewer_documents()
    os.environ["MASTER_ADDR"] = os.environ.get("MASTER_ADDR", "127.0.0.1")
    config = configuration(run)
    config.model.transformer_layer_spec = alike if stacked else mixed
    config.model.hetereogenous_dist_checkpoint = not stacked
    config.ddp.use_megatron_fsdp = False
    bridge_pretrain.pretrain(config, forward_step)


def save_model(name: str, folder: str, tensor: int, expert: int, *, by_megatron_lm: bool = False) -> bool:
    """A Hugging Face model, as Bridge saves it in torch_dist, and as this package imports it.

    Args:
        name: The model.
        folder: Where to.
        tensor: Tensor-parallel ranks.
        expert: Expert-parallel ranks.
        by_megatron_lm: Whether it is also saved as Megatron-LM saves it.
    """
    from megatron.bridge.training.model_load_save import save_megatron_model

    source = f"{folder}/hugging_face"
    if dist.get_rank() == 0:
        write_model(name, source)
    dist.barrier()
    if not is_supported(source):
        return False
    let_mamba_be_built()
    sizes = hugging_face.Sizes(tensor=tensor, expert=expert, expert_tensor=1)
    with begun_anew(), process_group_for_conversion():
        bridge, model = hugging_face._build(hugging_face.Source(source), sizes)
        bridge.load_hf_weights([model])
        save_megatron_model([model], f"{folder}/torch_dist", ckpt_format="torch_dist")
        if by_megatron_lm:
            save_as_megatron_lm(model, Path(folder, "torch_dist", "iter_0000000"), Path(folder, "megatron_lm"))
    with begun_anew():
        hugging_face.import_model(hugging_face.Source(source), sizes, Path(folder) / "imported")
    return True


ARGUMENTS = {"consumed_train_samples": 24, "tokenizer_type": "NullTokenizer", "hidden_size": 64, "lr": 1e-4}


def save_as_megatron_lm(model: Any, bridges: Path, folder: Path) -> None:
    """With Megatron-Core's own functions: arguments among the tensors, and in a file as older releases had them."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.common import save_common
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend

    others = {"attention_backend": AttnBackend.flash, "params_dtype": torch.bfloat16, "timeout": timedelta(minutes=10)}
    args = argparse.Namespace(**ARGUMENTS, **others, model_type=ModelType.encoder_or_decoder, save=Path("a"))
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 0, "kind": ModelType.encoder_or_decoder}
    for name in ("among_tensors", "in_a_file"):
        directory = folder / name / "iter_0000000"
        directory.mkdir(parents=True)
        dist_checkpointing.save({**common, "model": model.sharded_state_dict()}, str(directory))
        shutil.copy(bridges / "run_config.yaml", directory)
    save_common(common, str(folder / "in_a_file" / "iter_0000000"))


@no_process_group
def convert(source: str, destination: str, *, fails: bool = False, trusted: bool = True) -> Any:
    """Run the command, as on a machine without CUDA; what it prints."""
    from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix

    from tests.convert import storage_cli

    register_allowed_target_prefix("tests")
    arguments = ("from-torch-dist", source, destination, *["--trust-run-config"] * trusted)
    with begun_anew(), without_cuda():
        return storage_cli.refusal(*arguments) if fails else data(*arguments)


def expected(directory: Path) -> dict[str, torch.Tensor]:
    """What a converted checkpoint must hold, by rules written down here: tensors read whole by torch's own reader."""
    reader = FileSystemReader(str(directory))
    metadata = reader.read_metadata().state_dict_metadata
    stored = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_load(stored, storage_reader=reader, no_dist=True)
    found = {}
    for key, tensor in stored.items():
        if key.startswith(OPTIMIZER):
            slot, _, name = key.removeprefix(OPTIMIZER).partition(".")
            for ours, part in _parts(name, tensor):
                main = f"model.module.{ours}"
                found[main if slot == "param" else f"{OPTIMIZER}module.module.module.{ours}.{slot}"] = part
        elif f"{OPTIMIZER}param.{key}" not in stored and "optimizer" not in key:
            found |= {f"model.module.{ours}": part for ours, part in _parts(key, tensor)}
    return found


def _parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    stacked = re.fullmatch(r"decoder\.layers\.(\D.*)", name)
    if stacked:
        for number, layer in enumerate(tensor):
            yield from _parts(f"decoder.layers.{number}.{stacked[1]}", layer)
    elif ".experts.experts." in name:
        for number, expert in enumerate(tensor):
            yield from _parts(name.replace(".experts.experts.", f".experts.local_experts.{number}."), expert)
    elif name.endswith("linear_fc1.weight"):
        gate, up = tensor.chunk(2)
        yield from ((f"{name}_w", gate), (f"{name}_v", up))
    else:
        for theirs, ours in NORMS.items():
            name = re.sub(rf"(self_attention|mlp)\.{re.escape(theirs)}", ours, name)
        yield name, tensor
