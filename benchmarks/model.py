# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The model that is saved, as a Megatron-Bridge configuration: a small MoE with many experts, or a dense one.

The tensors of the one are tiny and many.  What a format spends on it is therefore the cost of a tensor, not of its
bytes; of the other it is the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from testing.kernels import CpuNorm

SEQUENCE, VOCABULARY = 32, 128


@dataclass(frozen=True, slots=True)
class Size:
    """What the number of tensors depends on, and how large they are.

    Args:
        experts: A layer's; 0 for dense layers.
        layers: How many.
        hidden: The width between layers.
        ffn: The width within a layer that has no experts.
    """

    experts: int
    layers: int
    hidden: int = 64
    ffn: int = 96

    def __str__(self) -> str:
        if self.experts:
            return f"MoE of {self.experts} experts x {self.layers} layers"
        return f"{self.layers} dense layers, {self.hidden:,} wide"


LARGE = {
    "0.43 GB": Size(0, 2, 1024, 4096),
    "1.7 GB": Size(0, 2, 2048, 8192),
    "4 GB": Size(0, 5, 2048, 8192),
}
"""By gigabytes of weights and moments, in fp32, as in `benchmarks.large`."""


def build_config(
    size: Size, steps: int, checkpoint_format: str, save: str | None, load: str | None, *, beside: bool = False
) -> Any:
    """A `ConfigContainer` for `pretrain`: `steps` steps in all, a save after every one, FusedAdam, all sharded."""
    from megatron.bridge.recipes.common import _pretrain_common
    from megatron.bridge.training.config import CheckpointConfig, TokenizerConfig

    config = _pretrain_common()
    config.model = _model(size)
    config.dataset = _dataset()
    config.tokenizer = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY - 1)
    config.checkpoint = CheckpointConfig(
        save=save, load=load, save_interval=1, ckpt_format=checkpoint_format, async_save=beside
    )
    config.dist.distributed_backend = "gloo"
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = steps, 8, 1
    config.validation.eval_iters, config.validation.eval_interval = 0, 1000
    _shard(config, checkpoint_format)
    config.ddp.average_in_collective = config.ddp.gradient_reduce_div_fusion = config.ddp.check_for_nan_in_grad = False
    config.optimizer.lr, config.optimizer.min_lr, config.optimizer.clip_grad = 1e-3, 0.0, 0.0
    config.scheduler.lr_warmup_iters, config.scheduler.lr_decay_iters = 0, 100
    config.logger.tensorboard_dir, config.logger.log_interval = None, 1
    return config


def _shard(config: Any, checkpoint_format: str) -> None:
    """All by Megatron-FSDP; for `torch_dist`, which can't save that, by Megatron's distributed optimizer."""
    config.ddp.use_megatron_fsdp = checkpoint_format != "torch_dist"
    if config.ddp.use_megatron_fsdp:
        config.ddp.data_parallel_sharding_strategy = "optim_grads_params"
    else:
        config.ddp.data_parallel_sharding_strategy = "no_shard"
        config.ddp.use_distributed_optimizer = config.optimizer.use_distributed_optimizer = True
        config.checkpoint.fully_parallel_save = True


def _model(size: Size) -> Any:
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    return GPTModelProvider(
        num_layers=size.layers,
        hidden_size=size.hidden,
        ffn_hidden_size=size.ffn,
        num_attention_heads=4,
        seq_length=SEQUENCE,
        vocab_size=VOCABULARY,
        make_vocab_size_divisible_by=8,
        position_embedding_type="rope",
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        share_embeddings_and_output_weights=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        deterministic_mode=True,
        pipeline_dtype=torch.bfloat16,
        transformer_layer_spec=_layers,
        **_without_fusions(),
        **(_mixture(size.experts) if size.experts else {}),
    )


def _without_fusions() -> dict[str, bool]:
    """Fused kernels exist for CUDA alone."""
    return {
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "masked_softmax_fusion": False,
        "cross_entropy_loss_fusion": False,
    }


def _mixture(experts: int) -> dict[str, Any]:
    return {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "moe_router_topk": 2,
        "moe_grouped_gemm": False,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_permute_fusion": False,
        "moe_router_fusion": False,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
    }


def _layers(config: Any) -> Any:
    """Layers of parts that run on a CPU."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    specs = []
    for _ in range(config.num_layers):
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=False, normalization="RMSNorm"
        )
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = CpuNorm
        specs.append(spec)
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=CpuNorm)


def _dataset() -> Any:
    from megatron.bridge.training.config import MockGPTDatasetConfig

    return MockGPTDatasetConfig(
        random_seed=1,
        reset_attention_mask=False,
        reset_position_ids=False,
        eod_mask_loss=False,
        seq_length=SEQUENCE,
        num_dataset_builder_threads=1,
        data_sharding=True,
        dataloader_type="single",
        num_workers=0,
        skip_getting_attention_mask_from_dataset=False,
    )
