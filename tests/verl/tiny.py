# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""VeRL's own Megatron engine on CPU ranks, over a tiny model of Qwen3.5's structure that Bridge imports.

The engine, its optimizer, schedule and checkpoint manager are VeRL's; layers that exist for CUDA alone are in `layers`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from mbridge_fsdp_ckpt.live.tensors import local_shard
from testing.kernels import replace_cuda_only_kernels
from tests.core.oracle import digest

SAFE = "fsdp_dtensor_safe"
TOKENS, LENGTH, BATCH = 120, 16, 4

ISSUE_4910 = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
    "overlap_cpu_optimizer_d2h_h2d": True,
    "use_precision_aware_optimizer": True,
}
DECOUPLED = {"megatron_fsdp_use_decoupled_grad": True, "overlap_grad_reduce": True}
GLOO = {"average_in_collective": False, "gradient_reduce_div_fusion": False}
_CUDA_ONLY = (
    "apply_rope_fusion",
    "bias_activation_fusion",
    "cross_entropy_loss_fusion",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_router_fusion",
    "moe_shared_expert_overlap",
    "persist_layer_norm",
)


@dataclass(frozen=True)
class Setup:
    """How to build an engine.

    Args:
        source: The Hugging Face model.
        directory: The run's checkpoints.
        model_type: "language_model" or "value_model", the critic's.
        mbridge_config: As in `checkpoint.mbridge_config`.
        checkpoint: More of the checkpoint configuration.
        optimizer: "issue 4910", or "fused" for Transformer Engine's FusedAdam on the device.
        overlap: Whether weights are gathered while the model computes.
        tensor: Tensor-parallel size.
        fsdp: Whether Megatron-FSDP wraps the model.
        steps: How many VeRL's driver says it will train.
        optim: More of the optimizer's configuration.
        layers: Which of `tests.verl.layers`.
    """

    source: str
    directory: str
    model_type: str = "language_model"
    mbridge_config: dict[str, Any] = field(default_factory=lambda: {"ckpt_format": SAFE})
    checkpoint: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "issue 4910"
    overlap: bool = True
    tensor: int = 1
    fsdp: bool = True
    steps: int = 20
    optim: dict[str, Any] = field(default_factory=dict)
    layers: str = "qwen35_layers"

    def on(self, **changes: Any) -> Setup:
        """The same, changed."""
        return replace(self, **changes)


def write_model(directory: str) -> None:
    """A Hugging Face checkpoint of random tensors without MTP layers, with a tokenizer, as VeRL wants it."""
    from tests.models import hugging_face

    model = hugging_face.MODELS["Qwen3.5-MoE"]
    config_class, settings = model.config
    plain = replace(model, config=(config_class, settings | {"mtp_num_hidden_layers": 0}), add=lambda shapes: {})
    with patch.dict(hugging_face.MODELS, {"plain": plain}):
        hugging_face.write("plain", directory)
    _write_tokenizer(directory)


def write_dense_model(directory: str) -> None:
    """A Llama of two layers, of random tensors."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=128, max_position_embeddings=32, tie_word_embeddings=False, **sizes)
    LlamaForCausalLM(config).save_pretrained(directory)
    _write_tokenizer(directory)


def _write_tokenizer(directory: str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers  # type: ignore[import-untyped]
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(126)} | {"<eos>": 126, "<pad>": 127}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(directory)


def build(setup: Setup) -> Any:
    """The engine, as VeRL's workers build and initialise it."""
    from verl.workers.config import HFModelConfig, McoreCheckpointConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine.megatron import transformer_impl

    from tests.verl import layers

    replace_cuda_only_kernels()
    hybrid = setup.optimizer == "issue 4910"
    settings: dict[str, Any] = {
        "use_megatron_fsdp": setup.fsdp,
        "tensor_model_parallel_size": setup.tensor,
        "use_remove_padding": False,
        "expert_tensor_parallel_size": 1,
        "override_ddp_config": GLOO | (DECOUPLED if hybrid else {}) | {"overlap_param_gather": setup.overlap},
        "override_transformer_config": {
            "transformer_layer_spec": getattr(layers, setup.layers),
            "attention_backend": "local",
            "deterministic_mode": True,
            "make_vocab_size_divisible_by": 8,
            **dict.fromkeys(_CUDA_ONLY, False),
        },
    }
    kinds = {
        "language_model": transformer_impl.MegatronEngineWithLMHead,
        "value_model": transformer_impl.MegatronEngineWithValueHead,
    }
    engine = kinds[setup.model_type](
        HFModelConfig(path=setup.source, model_type=setup.model_type, override_config={"attn_implementation": "eager"}),
        McoreEngineConfig(**settings),
        McoreOptimizerConfig(
            **{
                "lr": 1e-3,
                "lr_warmup_steps": 3,
                "total_training_steps": setup.steps,
                "use_checkpoint_opt_param_scheduler": True,
                "override_optimizer_config": dict(ISSUE_4910) if hybrid else {},
                **setup.optim,
            }
        ),
        McoreCheckpointConfig(mbridge_config=dict(setup.mbridge_config), **setup.checkpoint),
    )
    engine.initialize()
    return engine


def step(engine: Any, number: int) -> float:
    """One training step of VeRL on a batch that depends on `number` alone; this rank's loss."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.dataset.dataset_utils import DatasetPadMode
    from verl.workers.utils.losses import sft_loss

    generator = torch.Generator().manual_seed(1_000 + number)
    ranks, rank = engine.get_data_parallel_size(), engine.get_data_parallel_rank()
    rows = torch.randint(0, TOKENS, (BATCH, LENGTH), generator=generator).chunk(ranks)[rank]
    tensors = {"input_ids": rows, "position_ids": torch.arange(LENGTH).expand_as(rows), "loss_mask": rows >= 0}
    batch = tu.get_tensordict(
        {name: torch.nested.nested_tensor(list(rows), layout=torch.jagged) for name, rows in tensors.items()},
        non_tensor_dict={
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": 1,
            "global_batch_size": BATCH,
            "temperature": 1.0,
            "pad_mode": DatasetPadMode.NO_PADDING,
        },
    )
    loss = _value_loss if engine.is_value_model else partial(sft_loss, config=None)
    with engine.train_mode():
        output = engine.train_batch(batch, loss)
        engine.lr_scheduler_step()
    random.random(), np.random.rand(), torch.rand(1)  # a step draws numbers, of all kinds
    return float(np.mean(output["loss"]))


def _value_loss(model_output: Any, data: Any, dp_group: Any = None) -> Any:
    return model_output["values"].values().float().square().mean(), {}


@dataclass(frozen=True)
class Snapshot:
    """All that training goes on from, as clones.

    Args:
        tensors: By name; "weight." main weights, "compute." what the forward pass reads or gathers from, "copy." what
            an offloading optimizer keeps of the weights, "slot." optimizer state.
        schedule: Of the learning rate, and the hyperparameters in force.
        numbers: Random-number states.
    """

    tensors: dict[str, torch.Tensor]
    schedule: Any
    numbers: Any

    def digests(self) -> dict[str, Any]:
        """Comparable across processes."""
        named: dict[str, Any] = {name: digest(tensor) for name, tensor in self.tensors.items()}
        return named | {"schedule": repr(self.schedule), "numbers": repr(_comparable(self.numbers))}


def snapshot(engine: Any) -> Snapshot:
    """What this rank has now."""
    return Snapshot({name: t.detach().clone() for name, t in _places(engine)}, _schedule(engine), _numbers())


def put_back(engine: Any, state: Snapshot) -> None:
    """Set this rank to an earlier state, in place."""
    with torch.no_grad():
        for name, tensor in _places(engine):
            tensor.copy_(state.tensors[name])
    engine.lr_scheduler.num_steps = state.schedule["num_steps"]
    for group, saved in zip(engine.optimizer.param_groups, state.schedule["groups"], strict=True):
        group.update(saved)
    python, numpy, cpu, tracked = state.numbers
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    _tracker().set_states({name: value.clone() for name, value in tracked.items()})


def _places(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    module, inner = engine.module[0].module, engine.optimizer.optimizer
    named = {
        name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if isinstance(tensor, torch.Tensor)
    }
    for name, tensor in named.items():
        yield f"weight.{name}", local_shard(tensor)
        for slot, value in inner.state.get(tensor, {}).items():
            yield f"{'copy' if slot == 'master_param' else 'slot'}.{name}.{slot}", local_shard(value)
        copy = getattr(inner, "param_to_inner_param", {}).get(tensor)
        if copy is not None:
            yield f"copy.{name}", copy
    buffer = module.param_and_grad_buffer
    for group in buffer.parameter_groups:
        for item, parameter in enumerate(group.params if group.model_weight_buffer is not None else ()):
            yield f"compute.{buffer.param_to_name[parameter]}", group.model_weight_buffer.get_item(item)


def _schedule(engine: Any) -> dict[str, Any]:
    groups = [
        {name: group[name] for name in ("lr", "weight_decay", "betas", "eps")}
        for group in engine.optimizer.param_groups
    ]
    return {"num_steps": engine.lr_scheduler.num_steps, "groups": groups}


def _tracker() -> Any:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return get_cuda_rng_tracker()


def _numbers() -> Any:
    tracked = {name: state.clone() for name, state in _tracker().get_states().items()}
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), tracked


def _comparable(numbers: Any) -> Any:
    python, numpy, cpu, tracked = numbers
    return python, (numpy[0], numpy[1].tolist(), *numpy[2:]), digest(cpu), {n: digest(s) for n, s in tracked.items()}


class Loader:
    """The part of a dataloader that VeRL saves beside a checkpoint: where it stands."""

    position = 0

    def state_dict(self) -> dict[str, int]:
        """What VeRL saves."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """What VeRL gives back."""
        self.position = state["position"]


def handler(setup: Setup, engine: Any, keep: int | None = None) -> Any:
    """VeRL's own bookkeeping of a run: directories by step, tracker, dataloader, automatic resume."""
    from verl.utils.checkpoint import CheckpointHandler

    return CheckpointHandler(engine, Loader(), default_local_dir=setup.directory, max_ckpt_to_keep=keep)


def sharded(setup: Setup, number: int) -> Path:
    """Where a step's sharded checkpoint is."""
    return Path(setup.directory) / f"global_step_{number}" / "model" / "dist_ckpt"
