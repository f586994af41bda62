# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Tiny real models under real Megatron-FSDP, with a real Megatron optimizer, for tests, demo and benchmarks.

A `Recipe` describes a model.  `build` makes it with megatron-core alone; `testing.bridge.configuration` makes a
configuration of Megatron-Bridge from the same recipe.  Whoever builds from modules of their own uses the parts:
`initialise`, `config`, `layer`, `gated_delta_net`, `under_fsdp`, `adam`.

Gated DeltaNet layers need flash-linear-attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F

from testing.kernels import CpuNorm

VOCABULARY, SEQUENCE = 64, 16


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model, its layout and its optimizer.

    Args:
        layers: Transformer layers; with `gated_delta_net`, all but every third attend linearly.
        ffn: Width of a dense MLP; an expert is half as wide.
        experts: Experts a layer; 0 for dense MLPs.  MoE layers have a shared expert too.
        optimizer: "torch" forces torch's AdamW where Transformer Engine would provide FusedAdam.
        offload: Fraction that HybridDeviceOptimizer keeps on the host; None for no such optimizer.
        bias: Whether linear layers have biases.
        vocabulary: Rows of embeddings and output layer; more than `VOCABULARY` is padding.
        ddp: More settings of Megatron's DistributedDataParallelConfig.
        optimizer_settings: More settings of Megatron's OptimizerConfig.
    """

    layers: int = 2
    hidden: int = 32
    ffn: int = 48
    experts: int = 0
    gated_delta_net: bool = False
    bias: bool = False
    vocabulary: int = VOCABULARY
    tensor: int = 1
    expert: int = 1
    strategy: str = "optim_grads_params"
    instances: int = 1
    outer: str = "no_shard"
    optimizer: Literal["auto", "torch"] = "torch"
    offload: float | None = None
    ddp: dict[str, Any] = field(default_factory=dict)
    optimizer_settings: dict[str, Any] = field(default_factory=dict)

    def on(self, **layout: Any) -> Recipe:
        """The same model in another layout."""
        return replace(self, **layout)


@dataclass(slots=True)
class Trainable:
    """A model with its optimizer."""

    recipe: Recipe
    model: Any
    optimizer: Any

    def step(self, number: int) -> float:
        """One training step on a batch that depends on `number` alone; the mean loss over all ranks."""
        from megatron.core import parallel_state
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads

        generator = torch.Generator().manual_seed(1_000 + number)
        ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        tokens = torch.randint(0, VOCABULARY, (max(4, ranks), SEQUENCE + 1), generator=generator)
        own = tokens.tensor_split(ranks)[rank].cuda()
        self.model.module.is_last_microbatch = True  # Megatron's schedules say so; hybrid sharding reduces only then
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        positions = torch.arange(SEQUENCE).cuda().expand(own.shape[0], -1)
        future = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1).cuda()
        mask = future[None, None].expand(own.shape[0], 1, -1, -1)
        loss = self.model(own[:, :-1], positions, mask, labels=own[:, 1:]).float().mean()
        loss.backward()
        finalize_model_grads([self.model])
        self.optimizer.step()
        total = loss.detach().clone()
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        return float(total) / dist.get_world_size()


def build(
    recipe: Recipe,
    seed: int = 123,
    change: Callable[[Any], None] | None = None,
    make: Callable[[Recipe], Any] | None = None,
) -> Trainable:
    """Initialise Megatron's groups and build; a process group exists, and a GPU, or what stands in for it.

    Args:
        recipe: What to build.
        seed: Of the initial weights.
        change: Called with the plain module before Megatron-FSDP wraps it.
        make: Makes the plain module; None for `gpt`.
    """
    sizes = {"tensor_model_parallel_size": recipe.tensor, "expert_model_parallel_size": recipe.expert}
    initialise(seed, **sizes, expert_tensor_parallel_size=1, num_distributed_optimizer_instances=recipe.instances)
    module = (make or gpt)(recipe)
    if change is not None:
        change(module)
    model = under_fsdp(module.cuda(), recipe.strategy, recipe.instances, recipe.outer, **recipe.ddp)
    return Trainable(recipe, model, _optimizer(recipe, model))


def build_fp8(recipe: Recipe, seed: int = 123) -> Trainable:
    """The same with Transformer Engine's modules in FP8, with delayed scaling; needs a GPU that has it."""
    return build(recipe, seed, make=_fp8_gpt)


def initialise(seed: int, **sizes: int) -> None:
    """Megatron's groups and random numbers; a process group exists.  A second call changes the seed alone.

    Args:
        seed: Of the random numbers.
        **sizes: Of the groups, as `parallel_state.initialize_model_parallel` names them.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(**sizes)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


LINEAR_ATTENTION = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
COMMON: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
}
"""Settings of a transformer on CPU ranks: small, deterministic, without kernels that exist for CUDA alone."""


def config(*, kind: Any = None, **settings: Any) -> Any:
    """Megatron's configuration of a tiny transformer in bf16.

    Args:
        kind: Its class; None for `TransformerConfig`.
        **settings: Settings that `COMMON` does not have, or has otherwise.
    """
    from megatron.core.transformer import TransformerConfig

    return (kind or TransformerConfig)(**COMMON | {"bf16": True, "params_dtype": torch.bfloat16} | settings)


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """The settings of a recipe's transformer, as megatron-core and Bridge's providers name them alike."""
    experts: dict[str, Any] = {
        "num_moe_experts": recipe.experts,
        "moe_ffn_hidden_size": recipe.ffn // 2,
        "moe_shared_expert_intermediate_size": recipe.ffn // 2,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "moe_router_fusion": False,
        "expert_model_parallel_size": recipe.expert,
        "expert_tensor_parallel_size": 1,
    }
    return {
        **COMMON,
        "num_layers": recipe.layers,
        "hidden_size": recipe.hidden,
        "ffn_hidden_size": recipe.ffn,
        "gated_linear_unit": True,
        "add_bias_linear": recipe.bias,
        "tensor_model_parallel_size": recipe.tensor,
        "sequence_parallel": recipe.tensor > 1 and bool(recipe.experts),
        **(LINEAR_ATTENTION if recipe.gated_delta_net else {}),
        **(experts if recipe.experts else {}),
    }


def _config(recipe: Recipe, **more: Any) -> Any:
    return config(**settings_of(recipe), deterministic_mode=recipe.gated_delta_net, **more)


def gpt(recipe: Recipe) -> Any:
    """The plain module, to be wrapped."""
    settings = _config(recipe)
    linear = gated_delta_net(conv_bias=True, bias=True) if recipe.gated_delta_net else None
    return _gpt(recipe, settings, layers(settings, linear))


def _fp8_gpt(recipe: Recipe) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    settings = _config(recipe, fp8="hybrid", fp8_recipe="delayed", fp8_amax_history_len=16)
    return _gpt(recipe, settings, get_gpt_layer_with_transformer_engine_spec())


def _gpt(recipe: Recipe, settings: Any, spec: Any) -> Any:
    from megatron.core.models.gpt import GPTModel

    return half(GPTModel(settings, spec, recipe.vocabulary, SEQUENCE, position_embedding_type="rope"))


def half(module: Any) -> Any:
    """A plain module with a config, wrapped as training wraps a model in bf16."""
    from megatron.core.transformer.module import Float16Module

    return Float16Module(module.config, module)


def layers(config: Any, linear: Any = None) -> Any:
    """The specs of all layers of a configuration.

    Args:
        config: Megatron's configuration, or Bridge's provider.
        linear: The spec that takes the place of attention in all layers but every third; None for attention in all.
    """
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    specs = [layer(config) for _ in range(config.num_layers)]
    for number, spec in enumerate(specs):
        if linear is not None and number % 3 != 2:
            spec.submodules.self_attention = linear
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=CpuNorm)


def layer(config: Any, *, engine: bool = False) -> Any:
    """The spec of a layer that fits a configuration, of Megatron's own modules or of Transformer Engine's.

    Args:
        config: Megatron's configuration, or Bridge's provider.
        engine: Whether modules are Transformer Engine's.  Megatron's own compute on CPU ranks.
    """
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )

    common = {
        "num_experts": config.num_moe_experts or None,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
    }
    if engine:
        fused = getattr(config, "mla_down_proj_fusion", False)
        return get_gpt_layer_with_transformer_engine_spec(**common, mla_down_proj_fusion=fused)
    spec = get_gpt_layer_local_spec(**common, normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = CpuNorm
    if config.qk_layernorm:
        attention = spec.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = CpuNorm
    return spec


def gated_delta_net(in_proj: Any = None, out_proj: Any = None, norm: Any = CpuNorm, **parameters: Any) -> Any:
    """The spec of a layer's Gated DeltaNet.

    Args:
        in_proj: Class of the first linear layer; None for Megatron's own.
        out_proj: Class of the last one; None for Megatron's own.
        norm: Builder of the norm between them.
        **parameters: Of the module.
    """
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    submodules = GatedDeltaNetSubmodules(
        in_proj=in_proj or ColumnParallelLinear, out_norm=norm, out_proj=out_proj or RowParallelLinear
    )
    return ModuleSpec(module=GatedDeltaNet, submodules=submodules, params=parameters)


def under_fsdp(module: Any, strategy: str, instances: int, outer: str, **ddp: Any) -> Any:
    """A plain module with a config, wrapped in Megatron-FSDP.

    Args:
        module: The module; it is wrapped, not copied.
        strategy: What is sharded over data-parallel ranks.
        instances: Copies of the sharded optimizer, for hybrid sharding.
        outer: What hybrid sharding shards over those copies.
        **ddp: More settings of Megatron's `DistributedDataParallelConfig`.
    """
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.ssm.mamba_layer import MambaLayer
    from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer

    settings: dict[str, Any] = {
        "use_distributed_optimizer": True,
        "use_megatron_fsdp": True,
        "data_parallel_sharding_strategy": strategy,
        "num_distributed_optimizer_instances": instances,
        "outer_dp_sharding_strategy": outer,
        "gradient_reduce_div_fusion": False,
        "overlap_grad_reduce": strategy in ("optim_grads", "optim_grads_params"),
        "overlap_param_gather": strategy == "optim_grads_params",
        **ddp,
    }
    # the default of core 0.19; that of 0.18 lacks Mamba's layer, and a model of those alone cannot be wrapped
    units = [TransformerLayer, MoETransformerLayer, MambaLayer] if strategy == "optim_grads_params" else []
    return FullyShardedDataParallel(module.config, DistributedDataParallelConfig(**settings), module, units)


def _optimizer(recipe: Recipe, model: Any) -> Any:
    offload: dict[str, Any] = {}
    if recipe.offload is not None:
        offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": recipe.offload}
    return adam(model, torch_only=recipe.optimizer == "torch", **offload | recipe.optimizer_settings)


def adam(model: Any, *, torch_only: bool = True, **settings: Any) -> Any:
    """Megatron's distributed optimizer over a wrapped model.

    Args:
        model: The model.
        torch_only: Whether torch's AdamW serves where Transformer Engine would provide FusedAdam.
        **settings: More settings of Megatron's `OptimizerConfig`.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    common: dict[str, Any] = {
        "optimizer": "adam",
        "lr": 1e-2,
        "weight_decay": 0.1,
        "use_distributed_optimizer": True,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "clip_grad": 0.0,
    }
    with torch_adam() if torch_only else nullcontext():
        return get_megatron_optimizer(OptimizerConfig(**common | settings), [model])


@contextmanager
def torch_adam() -> Iterator[None]:
    """Let Megatron choose torch's AdamW, as it does where Transformer Engine is not installed."""
    import megatron.core.optimizer as megatron_optimizer

    before = megatron_optimizer.Adam, megatron_optimizer.USING_PYTORCH_OPTIMIZER
    megatron_optimizer.Adam, megatron_optimizer.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True
    try:
        yield
    finally:
        megatron_optimizer.Adam, megatron_optimizer.USING_PYTORCH_OPTIMIZER = before
