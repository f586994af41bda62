"""Recipes with the structure of Qwen3.5: Gated DeltaNet and attention layers, experts beside a shared expert.

A recipe is a function that makes a configuration of Megatron-Bridge; it reads nothing from the network.
"""

from __future__ import annotations

from typing import Any

from mbridge_fsdp_ckpt.bridge.plugin import SAFE


def qwen35_tiny() -> Any:
    """Three layers, four experts, mock data: trains in seconds, without Transformer Engine's layers."""
    import torch
    import torch.nn.functional as F
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    model = GPTModelProvider(
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
        num_moe_experts=4,
        moe_ffn_hidden_size=32,
        moe_shared_expert_intermediate_size=32,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        expert_tensor_parallel_size=1,
        deterministic_mode=True,  # without it, Gated DeltaNet needs a Triton kernel
        pipeline_dtype=torch.bfloat16,
        transformer_layer_spec=_tiny_layers,
        **dict.fromkeys(_FUSIONS, False),
    )
    config = _mock_training(model)
    config.train.train_iters, config.train.global_batch_size = 10, 8
    config.scheduler.lr_warmup_iters, config.scheduler.lr_decay_iters = 0, 100
    config.dataset.num_workers = 0
    config.checkpoint.save_interval = 5
    config.logger.log_interval = 1
    config.ddp.average_in_collective = False  # gloo can't
    return config


def qwen35_35b_a3b() -> Any:
    """Qwen3.5-35B-A3B (text) as in issue 4910: 32 GPUs, TP 2, CP 2, EP 8, the whole optimizer offloaded to the CPU."""
    config = _mock_training(_qwen35_35b_a3b_model())
    model, optimizer, ddp = config.model, config.optimizer, config.ddp
    model.tensor_model_parallel_size, model.sequence_parallel = 2, True
    model.context_parallel_size = 2
    model.expert_model_parallel_size, model.expert_tensor_parallel_size = 8, 1
    config.train.train_iters, config.train.global_batch_size = 100, 32
    config.scheduler.lr_warmup_iters = 10
    config.checkpoint.save_interval = 50
    optimizer.optimizer_cpu_offload, optimizer.optimizer_offload_fraction = True, 1.0
    optimizer.overlap_cpu_optimizer_d2h_h2d = True
    optimizer.use_precision_aware_optimizer = ddp.megatron_fsdp_use_decoupled_grad = True
    return config


RECIPES = {recipe.__name__: recipe for recipe in (qwen35_tiny, qwen35_35b_a3b)}

_FUSIONS = (
    "apply_rope_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "cross_entropy_loss_fusion",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_router_fusion",
)


def _mock_training(model: Any) -> Any:
    """Bridge's defaults of pre-training under Megatron-FSDP, on mock data, saving and resuming in our format."""
    from megatron.bridge.recipes.common import _pretrain_common
    from megatron.bridge.training.config import CheckpointConfig, MockGPTDatasetConfig, TokenizerConfig

    config = _pretrain_common()
    config.model = model
    config.tokenizer = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=model.vocab_size - 1)
    config.dataset = MockGPTDatasetConfig(
        random_seed=1234,
        reset_attention_mask=False,
        reset_position_ids=False,
        eod_mask_loss=False,
        seq_length=model.seq_length,
        num_dataset_builder_threads=1,
        data_sharding=True,
        dataloader_type="single",
        skip_getting_attention_mask_from_dataset=False,
    )
    config.train.micro_batch_size = 1
    config.validation.eval_iters = 0
    config.ddp.use_megatron_fsdp = True
    config.ddp.data_parallel_sharding_strategy = "optim_grads_params"
    config.checkpoint = CheckpointConfig(save="checkpoints", load="checkpoints", ckpt_format=SAFE)
    config.logger.tensorboard_dir = None
    return config


def _qwen35_35b_a3b_model() -> Any:
    """The model of Bridge's recipe `qwen35_text_35b_a3b_pretrain_8gpu_gb200_bf16_config`.

    That recipe downloads the configuration from Hugging Face.  Here Bridge converts the same one from the class that
    transformers has for it, whose defaults are this model; what the published file changes is given.
    """
    import torch
    from megatron.bridge import AutoBridge
    from transformers import Qwen3_5MoeTextConfig

    published = Qwen3_5MoeTextConfig(
        max_position_embeddings=262144,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
        architectures=["Qwen3_5MoeForCausalLM"],  # how Bridge tells the text model from the one that sees
    )
    model = AutoBridge.from_hf_config(published).to_megatron_provider(load_weights=False)
    model.seq_length, model.pipeline_dtype = 4096, torch.bfloat16
    model.moe_grouped_gemm, model.moe_token_dispatcher_type = True, "alltoall"
    model.recompute_granularity, model.recompute_method, model.recompute_num_layers = "full", "uniform", 1
    return model


class _TorchNorm:
    """torch's norm, called like Megatron's norm builders, for sequence-parallel layers too.

    Megatron's own wrapper refuses those: it doesn't mark the norm's parameters, whose gradients are partial sums there.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        """Build the norm: this class is never instantiated itself, but Megatron takes a function for the norm."""
        import copy

        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm: Any = WrappedTorchNorm(config=plain, hidden_size=hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def _tiny_layers(config: Any) -> Any:
    """Two Gated DeltaNet layers for each attention layer, of Megatron's own modules."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    def layer(*, linear: bool) -> Any:
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=False, normalization=config.normalization
        )
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = _TorchNorm
        if linear:
            parts = GatedDeltaNetSubmodules(
                in_proj=ColumnParallelLinear, out_norm=_TorchNorm, out_proj=RowParallelLinear
            )
            spec.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=parts)
        return spec

    layers = [layer(linear=index % 3 != 2) for index in range(config.num_layers)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=_TorchNorm)
