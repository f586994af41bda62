# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Small real models under real Megatron-FSDP, with a real Megatron optimizer, for tests, demo and benchmark.

`build` needs megatron-core alone.  Gated DeltaNet layers need flash-linear-attention besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def build(recipe: Recipe, seed: int = 123, change: Callable[[Any], None] | None = None) -> Trainable:
    """Initialise Megatron's groups and build; a process group exists, and a GPU, or what stands in for it.

    Args:
        recipe: What to build.
        seed: Of the initial weights.
        change: Called with the plain module before Megatron-FSDP wraps it.
    """

    def make(of: Recipe) -> Any:
        module = gpt(of)
        if change is not None:
            change(module)
        return module

    return _built(recipe, seed, make)


def build_fp8(recipe: Recipe, seed: int = 123) -> Trainable:
    """The same with Transformer Engine's modules in FP8, with delayed scaling; needs a GPU that has it."""
    return _built(recipe, seed, _fp8_gpt)


def _built(recipe: Recipe, seed: int, make: Callable[[Recipe], Any]) -> Trainable:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=recipe.tensor,
            expert_model_parallel_size=recipe.expert,
            expert_tensor_parallel_size=1,
            num_distributed_optimizer_instances=recipe.instances,
        )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    model = under_fsdp(make(recipe).cuda(), recipe.strategy, recipe.instances, recipe.outer, **recipe.ddp)
    return Trainable(recipe, model, _optimizer(recipe, model))


_LINEAR_ATTENTION = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}


def _config(recipe: Recipe) -> Any:
    from megatron.core.transformer import TransformerConfig

    moe: dict[str, Any] = {}
    if recipe.experts:
        moe = {
            "num_moe_experts": recipe.experts,
            "moe_ffn_hidden_size": recipe.ffn // 2,
            "moe_shared_expert_intermediate_size": recipe.ffn // 2,
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "expert_model_parallel_size": recipe.expert,
            "expert_tensor_parallel_size": 1,
        }
    return TransformerConfig(
        num_layers=recipe.layers,
        hidden_size=recipe.hidden,
        num_attention_heads=4,
        ffn_hidden_size=recipe.ffn,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=recipe.bias,
        bf16=True,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        tensor_model_parallel_size=recipe.tensor,
        sequence_parallel=recipe.tensor > 1 and bool(recipe.experts),
        deterministic_mode=recipe.gated_delta_net,
        **(_LINEAR_ATTENTION if recipe.gated_delta_net else {}),
        **moe,
    )


def gpt(recipe: Recipe) -> Any:
    """The plain module, to be wrapped."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    config = _config(recipe)
    layers = [_layer(recipe, linear=recipe.gated_delta_net and index % 3 != 2) for index in range(recipe.layers)]
    block = TransformerBlockSubmodules(layer_specs=layers, layer_norm=CpuNorm)
    model = GPTModel(config, block, recipe.vocabulary, SEQUENCE, position_embedding_type="rope")
    return Float16Module(config, model)


def _fp8_gpt(recipe: Recipe) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.module import Float16Module

    config = replace(_config(recipe), fp8="hybrid", fp8_recipe="delayed", fp8_amax_history_len=16)
    spec = get_gpt_layer_with_transformer_engine_spec()
    gpt = GPTModel(config, spec, recipe.vocabulary, SEQUENCE, position_embedding_type="rope")
    return Float16Module(config, gpt)


def _layer(recipe: Recipe, *, linear: bool) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(num_experts=recipe.experts or None, moe_grouped_gemm=False, normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = CpuNorm
    if linear:
        spec.submodules.self_attention = _gated_delta_net()
    return spec


def _gated_delta_net() -> Any:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    submodules = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=CpuNorm, out_proj=RowParallelLinear)
    return ModuleSpec(module=GatedDeltaNet, submodules=submodules, params={"conv_bias": True, "bias": True})


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
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    offload = {}
    if recipe.offload is not None:
        offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": recipe.offload}
    settings = {
        "optimizer": "adam",
        "lr": 1e-2,
        "weight_decay": 0.1,
        "use_distributed_optimizer": True,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "clip_grad": 0.0,
        **offload,
        **recipe.optimizer_settings,
    }
    with torch_adam() if recipe.optimizer == "torch" else _as_it_is():
        return get_megatron_optimizer(OptimizerConfig(**settings), [model])


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


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
