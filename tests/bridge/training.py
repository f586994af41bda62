# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Real `pretrain()` runs of a small Qwen3.5-shaped model, as cases for ranks that live on."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

import mbridge_fsdp_ckpt
from testing.collectives import count_collectives
from testing.kernels import CpuNorm, replace_cuda_only_kernels
from testing.models import Recipe, Trainable, torch_adam
from testing.ranks import no_process_group
from tests.applied import applied_numbers
from tests.core import oracle
from tests.mock_data import fewer_documents

_LOSS = re.compile(r"lm loss: ([0-9.E+-]+)")


@dataclass(frozen=True)
class Run:
    """One call of `pretrain()`.

    Args:
        directory: Checkpoints, to load from and to save to.
        iterations: Last iteration.
        optimizer: "fused" (Transformer Engine) or "torch".
        adapters: Whether Bridge's LoRA is trained, over `checkpoint.pretrained_checkpoint`.
        config: More settings, by dotted name in Bridge's config.
    """

    directory: str
    iterations: int = 4
    save_every: int = 2
    format: str = "fsdp_dtensor_safe"
    takeover: bool = False
    optimizer: str = "fused"
    offload: float = 0.0
    tensor: int = 1
    expert: int = 1
    experts: int = 4
    adapters: bool = False
    config: dict[str, Any] = field(default_factory=dict)

    def on(self, **changes: Any) -> Run:
        """The same run, changed."""
        return replace(self, **changes)


@no_process_group
def train(run: Run, callbacks: Any = None) -> dict[str, Any]:
    """Train; what was seen.

    Returns:
        losses as full floats by iteration, digests of all tensors after the load and at the end, collectives of each
        save, what the optimizer's kernels were handed in each iteration, and progress after the load.
    """
    from megatron.bridge.training import pretrain as bridge_pretrain
    from megatron.bridge.training.gpt_step import forward_step

    replace_cuda_only_kernels()
    fewer_documents()
    if run.format == "fsdp_dtensor_safe" or run.takeover:
        mbridge_fsdp_ckpt.register(takeover=run.takeover)
    else:
        mbridge_fsdp_ckpt.unregister()
    os.environ["MASTER_ADDR"] = os.environ.get("MASTER_ADDR", "127.0.0.1")
    seen = _Observer(run)
    with seen.installed(), torch_adam() if run.optimizer == "torch" else _nothing(), applied_numbers() as applied:
        bridge_pretrain.pretrain(configuration(run), forward_step, callbacks)
    return {
        "losses": seen.losses,
        "end": seen.end,
        "saves": seen.saves,
        "loaded": seen.loaded,
        "applied": applied,
        "progress": seen.progress,
    }


class _Observer:
    """Watches a run through names that Bridge looks up when it calls them."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.losses: dict[int, float] = {}
        self.saves: list[dict[str, int]] = []
        self.loaded: oracle.Digests = {}
        self.end: oracle.Digests = {}
        self.progress: dict[str, float] = {}

    def installed(self) -> Any:
        from contextlib import ExitStack
        from unittest.mock import patch

        from megatron.bridge.training import setup, train

        stack = ExitStack()
        log, create = train.training_log, setup.create_checkpoint_manager
        stack.enter_context(patch.object(train, "training_log", self._logged(log)))
        stack.enter_context(patch.object(setup, "create_checkpoint_manager", self._watched(create)))
        return stack

    def _logged(self, log: Any) -> Any:
        def logged(loss_dict: Any, *args: Any, **kwargs: Any) -> Any:
            state = next(a for a in (*args, *kwargs.values()) if hasattr(a, "train_state"))
            self.losses[state.train_state.step] = float(loss_dict["lm loss"])
            return log(loss_dict, *args, **kwargs)

        return logged

    def _watched(self, create: Any) -> Any:
        def watched(config: Any) -> Any:
            manager = create(config)
            save, load = manager.save, manager.load

            def counted_save(context: Any, callbacks: Any = None) -> None:
                with count_collectives() as counts:
                    save(context, callbacks)
                self.saves.append(dict(counts.collectives))
                self.end = self._digests(context)

            def watched_load(context: Any) -> Any:
                result = load(context)
                self.loaded, self.progress = self._digests(context), dict(vars(context.state.train_state))
                return result

            manager.save, manager.load = counted_save, watched_load
            return manager

        return watched

    def _digests(self, context: Any) -> oracle.Digests:
        recipe = Recipe(tensor=self.run.tensor, expert=self.run.expert, experts=self.run.experts)
        return oracle.live(Trainable(recipe, context.model[0], context.optimizer))


def configuration(run: Run) -> Any:
    """Bridge's configuration of a run."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.recipes.common import _pretrain_common
    from megatron.bridge.training.config import CheckpointConfig, MockGPTDatasetConfig, TokenizerConfig

    moe = {
        "num_moe_experts": run.experts,
        "moe_ffn_hidden_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "moe_router_topk": 2,
        "moe_grouped_gemm": False,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_permute_fusion": False,
        "moe_router_fusion": False,
        "expert_model_parallel_size": run.expert,
        "expert_tensor_parallel_size": 1,
    }
    config = _pretrain_common()
    config.model = GPTModelProvider(
        num_layers=3,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        seq_length=32,
        vocab_size=128,
        make_vocab_size_divisible_by=8,
        position_embedding_type="rope",
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        share_embeddings_and_output_weights=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        deterministic_mode=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        cross_entropy_loss_fusion=False,
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=run.tensor,
        sequence_parallel=run.tensor > 1,
        transformer_layer_spec=_qwen35_shaped,
        **moe,
    )
    config.dist.distributed_backend = "gloo"
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = run.iterations, 8, 1
    config.validation.eval_iters, config.validation.eval_interval = 0, 1000
    config.dataset = MockGPTDatasetConfig(
        random_seed=1,
        reset_attention_mask=False,
        reset_position_ids=False,
        eod_mask_loss=False,
        seq_length=32,
        num_dataset_builder_threads=1,
        data_sharding=True,
        dataloader_type="single",
        num_workers=0,
        skip_getting_attention_mask_from_dataset=False,
    )
    config.tokenizer = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=127)
    config.ddp.use_megatron_fsdp = True
    config.ddp.data_parallel_sharding_strategy = "optim_grads_params"
    config.ddp.average_in_collective = config.ddp.gradient_reduce_div_fusion = config.ddp.check_for_nan_in_grad = False
    config.optimizer.lr, config.optimizer.min_lr, config.optimizer.clip_grad = 1e-3, 0.0, 0.0
    config.scheduler.lr_warmup_iters, config.scheduler.lr_decay_iters = 0, 100
    if run.offload:
        config.optimizer.optimizer_cpu_offload = config.optimizer.overlap_cpu_optimizer_d2h_h2d = True
        config.optimizer.optimizer_offload_fraction = run.offload
    config.checkpoint = CheckpointConfig(
        save=run.directory, load=run.directory, save_interval=run.save_every, ckpt_format=run.format
    )
    if run.adapters:
        from megatron.bridge.peft.lora import LoRA

        config.peft = LoRA()
    config.logger.tensorboard_dir, config.logger.log_interval = None, 1
    for name, value in run.config.items():
        section, _, attribute = name.rpartition(".")
        setattr(getattr(config, section), attribute, value)
    return config


def _qwen35_shaped(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    def layer(*, linear: bool) -> Any:
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=False, normalization="RMSNorm"
        )
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = CpuNorm
        if linear:
            parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=CpuNorm, out_proj=RowParallelLinear)
            spec.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=parts)
        return spec

    layers = [layer(linear=index % 3 != 2) for index in range(config.num_layers)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=CpuNorm)


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()
