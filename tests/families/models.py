# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Small Megatron-Core models of every family; most are built, not run.

A model is a bag of blocks, each with a config of its own, so that one model holds many variants of a family.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from megatron.core import parallel_state

from testing import models
from testing.kernels import CpuNorm
from testing.models import SEQUENCE, VOCABULARY, half, layer
from tests.families.reference import Layout, Weights
from tests.upstream import is_before

EXPERTS = 4
EXPERT_NUMBER = re.compile(r"(?<=\.local_experts\.)\d+|(?<=\.experts\.linear_fc1\.weight)\d+$")
INTERLEAVED = re.compile(r"interleaved_(routed.*\.experts|shared.*\.shared_experts)\.linear_fc1\.weight\d*$")
HALF_ADAPTED = re.compile(r"linear_fc1\.adapter\.adapter_(up|gate)\.linear_out\.weight$")
FUSED_NORM = "self_attention.linear_qkv_down_proj.layer_norm_weight"
LINEAR_ATTENTION_ROWS = [32, 32, 64, 64, 8, 8]  # query, key, value, z, beta, alpha

Builder = Callable[[Layout], Any]


def build(name: str, layout: Layout) -> Any:
    """A plain module in bf16, ready to be wrapped."""
    return MODELS[name](layout)


def corrected(name: str, whole: Weights) -> torch.Tensor | None:
    """A parameter that Megatron's or Bridge's `sharded_state_dict` cuts otherwise than the module does, else None.

    They take every linear_fc1 for gate above up, also where blocks of both alternate and where an adapter has one of
    them alone, and Gated DeltaNet's adapters for one projection.  Core 0.18 leaves out a fused down projection's norm.

    Args:
        name: The parameter on this rank.
        whole: The unsharded model.
    """
    if name.endswith(FUSED_NORM):
        return whole[name] if name in whole else whole[name.replace(FUSED_NORM, "input_layernorm.weight")]
    rank, ranks = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    if ".experts." in name:
        rank = parallel_state.get_expert_tensor_parallel_rank()
        ranks = parallel_state.get_expert_tensor_parallel_world_size()
    if INTERLEAVED.search(name) or HALF_ADAPTED.search(name):
        return _part(whole[_counted(name)], rank, ranks)
    if name.endswith(".self_attention.in_proj.adapter.linear_out.weight"):
        projections = whole[name].split(LINEAR_ATTENTION_ROWS)
        return torch.cat([_part(projection, rank, ranks) for projection in projections])
    return None


def _part(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return whole.chunk(ranks)[rank]


def _counted(name: str) -> str:
    """The name on one rank that has all experts."""
    own = EXPERTS // parallel_state.get_expert_model_parallel_world_size()
    first = parallel_state.get_expert_model_parallel_rank() * own
    return EXPERT_NUMBER.sub(lambda match: str(int(match[0]) + first), name)


def dense_gated(layout: Layout) -> Any:
    """Dense MLPs: every gated activation with and without biases, and ungated ones."""
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    gates: dict[str, dict[str, Any]] = {
        "swiglu": {"activation_func": F.silu},
        "geglu": {"activation_func": F.gelu, "add_bias_linear": True},
        "reglu": {"activation_func": F.relu},
        "quick_geglu": {"activation_func": quick_gelu, "add_bias_linear": True},
        "clamped": {"activation_func": F.silu, "activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0},
    }
    blocks = {name: block(config(layout, gated_linear_unit=True, **gate)) for name, gate in gates.items()}
    blocks["ungated"] = block(config(layout, activation_func=F.gelu, add_bias_linear=True))
    blocks["transformer_engine"] = block(config(layout, gated_linear_unit=True), engine=True)
    blocks["transformer_engine_bias"] = block(config(layout, gated_linear_unit=True, add_bias_linear=True), engine=True)
    return bag(layout, blocks)


def experts_gated(layout: Layout) -> Any:
    """Sequential and grouped experts with shared ones, gated and ungated."""
    swiglu: dict[str, Any] = {"gated_linear_unit": True, "activation_func": F.silu}
    ungated: dict[str, Any] = {"activation_func": F.gelu}
    grouped: dict[str, Any] = {"engine": True, "moe_grouped_gemm": True}
    blocks = {
        "sequential": moe_block(layout, **swiglu),
        "sequential_ungated": moe_block(layout, **ungated),
        "grouped": moe_block(layout, **swiglu, **grouped),
        "grouped_ungated": moe_block(layout, **ungated, **grouped),
    }
    return bag(layout, blocks, num_moe_experts=EXPERTS)


def experts_with_biases(layout: Layout) -> Any:
    """Gated experts with biases: Megatron has neither shared ones nor expert tensor parallelism for them."""
    geglu: dict[str, Any] = {
        "gated_linear_unit": True,
        "activation_func": F.gelu,
        "add_bias_linear": True,
        "moe_shared_expert_intermediate_size": None,
    }
    blocks = {
        "sequential": moe_block(layout, **geglu),
        "grouped": moe_block(layout, **geglu, engine=True, moe_grouped_gemm=True),
    }
    return bag(layout, blocks, num_moe_experts=EXPERTS)


def interleaved_gated(layout: Layout) -> Any:
    """Gate and up interleaved by blocks of rows, in grouped experts; from core 0.19 on, in shared experts like them.

    Megatron's `sharded_state_dict` takes these for halves: see `corrected`.
    """
    settings: dict[str, Any] = {"gated_linear_unit": True, "moe_grouped_gemm": True, "engine": True}
    shared: dict[str, Any] = {"use_grouped_gemm_for_shared_expert": True, "moe_shared_expert_glu_interleave_size": 5}
    blocks = {"interleaved_routed": moe_block(layout, moe_mlp_glu_interleave_size=3, **settings)}
    if not is_before("megatron-core", "0.19"):
        blocks["interleaved_shared"] = moe_block(layout, **shared, **settings)
    return bag(layout, blocks, num_moe_experts=EXPERTS)


def mixed_gating(layout: Layout) -> Any:
    """An ungated vision encoder with biases beside a gated language model."""
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel

    vision = config(layout, activation_func=F.gelu, add_bias_linear=True, num_layers=2)
    encoder = CLIPViTModel(vision, layer(vision), CpuNorm, CpuNorm, patch_dim=2, img_h=4, img_w=4)
    return bag(layout, {"vision_model": encoder, "language_model": gpt(config(layout, gated_linear_unit=True))})


def gated_delta_net(layout: Layout) -> Any:
    """Gated DeltaNet of Megatron's own modules and of Transformer Engine's, with and without convolution biases."""
    blocks = {
        f"{'engine' if engine else 'own'}{'_conv_bias' if conv_bias else ''}": linear_attention_block(
            layout, engine=engine, conv_bias=conv_bias
        )
        for engine in (False, True)
        for conv_bias in (False, True)
    }
    return bag(layout, blocks)


def attention(layout: Layout) -> Any:
    """Fused QKV: grouped queries, one group for all, an output gate, biases, norms, learned sinks."""
    variants: dict[str, dict[str, Any]] = {
        "two_groups": {"num_query_groups": 2, "add_qkv_bias": True},
        "one_group": {"num_query_groups": 1, "add_qkv_bias": True},
        "output_gate": {"num_query_groups": 2, "attention_output_gate": True, "qk_layernorm": True},
        "sinks": {"num_query_groups": 4, "softmax_type": "learnable"},
    }
    blocks = {name: block(config(layout, **settings)) for name, settings in variants.items()}
    blocks |= {f"engine_{name}": block(config(layout, **s), engine=True) for name, s in variants.items()}
    return bag(layout, blocks)


def latent_attention(layout: Layout) -> Any:
    """Multi-latent attention, each down projection a layer of its own."""
    return bag(layout, {"plain": latent_block(layout), "norms": latent_block(layout, qk_layernorm=True)})


def latent_attention_fused(layout: Layout) -> Any:
    """The same with one layer for both down projections, and the layer norm in it."""
    fused = {"mla_down_proj_fusion": True}
    blocks = {"plain": latent_block(layout, **fused), "norms": latent_block(layout, qk_layernorm=True, **fused)}
    return bag(layout, blocks)


def multi_token_prediction(layout: Layout) -> Any:
    """A language model that predicts two more tokens; gated experts."""
    return half(gpt(moe_config(layout, gated_linear_unit=True, mtp_num_layers=2), engine=True))


def mamba(layout: Layout) -> Any:
    """Mamba-2 of Megatron's own modules and of Transformer Engine's."""
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    blocks = {
        "own": mamba_layer(layout, ColumnParallelLinear, RowParallelLinear),
        "engine": mamba_layer(layout, TELayerNormColumnParallelLinear, TERowParallelLinear),
    }
    return bag(layout, blocks)


def everything(layout: Layout) -> Any:
    """Fused parameters of each kind, of modules that exist in every layout."""
    gated: dict[str, Any] = {"gated_linear_unit": True, "engine": True}
    blocks = {
        "dense": block(config(layout, gated_linear_unit=True, add_bias_linear=True, num_query_groups=2), engine=True),
        "linear_attention": linear_attention_block(layout, engine=True, conv_bias=True),
        "sequential": moe_block(layout, **gated),
        "grouped": moe_block(layout, moe_grouped_gemm=True, **gated),
        "ungated": block(config(layout, add_bias_linear=True, num_layers=2), engine=True),
    }
    return bag(layout, blocks, num_moe_experts=EXPERTS)


def tied(layout: Layout) -> Any:
    """A language model whose output layer is its embedding."""
    return half(gpt(config(layout, gated_linear_unit=True, num_layers=2), engine=True, tied=True))


def frozen(layout: Layout) -> Any:
    """`everything`, of which some does not train: whole blocks, and every second parameter of others."""
    model = everything(layout)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if "ungated" in name or "grouped.layers.0.mlp" in name or number % 2:
            parameter.requires_grad_(False)
    return model


def lora(layout: Layout) -> Any:
    """Bridge's LoRA over fused parameters of a frozen model; its output matrices are fused like what they adapt."""
    return adapted(adaptable(layout), ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj"])


def lora_grouped(layout: Layout) -> Any:
    """One adapter for all grouped experts, kept the same on all expert-parallel ranks."""
    return adapted(grouped_experts(layout), ["linear_fc1", "linear_fc2"])


def lora_each_expert(layout: Layout) -> Any:
    """An adapter for each grouped expert, a rank's in one parameter of three dimensions."""
    return adapted(grouped_experts(layout), ["linear_fc1", "linear_fc2"], share_expert_adapters=False)


def canonical_lora(layout: Layout) -> Any:
    """Bridge's LoRA with one adapter for each part of a fused parameter."""
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA

    return CanonicalLoRA(dim=8, alpha=8, lora_B_init_method="xavier")(adaptable(layout), training=True)


def adapted(model: Any, targets: list[str], **settings: Any) -> Any:
    """The model, frozen, with adapters."""
    from megatron.bridge.peft.lora import LoRA

    return LoRA(target_modules=targets, dim=8, alpha=8, lora_B_init_method="xavier", **settings)(model, training=True)


def adaptable(layout: Layout) -> Any:
    """Layers of each kind but grouped experts."""
    gated: dict[str, Any] = {"gated_linear_unit": True, "engine": True}
    blocks = {
        "dense": block(config(layout, gated_linear_unit=True, num_query_groups=2), engine=True),
        "linear_attention": linear_attention_block(layout, engine=True, conv_bias=True),
        "sequential": moe_block(layout, **gated),
    }
    return bag(layout, blocks, num_moe_experts=EXPERTS)


def grouped_experts(layout: Layout) -> Any:
    """A block of gated, grouped experts."""
    blocks = {"grouped": moe_block(layout, gated_linear_unit=True, moe_grouped_gemm=True, engine=True)}
    return bag(layout, blocks, num_moe_experts=EXPERTS)


def bag(layout: Layout, blocks: dict[str, Any], **settings: Any) -> Any:
    """Some modules as one."""
    from megatron.core.transformer.module import MegatronModule

    module: Any = MegatronModule(config(layout, **settings))
    for name, part in blocks.items():
        module.add_module(name, part)
    return half(module)


def gpt(settings: Any, *, engine: bool = False, tied: bool = False) -> Any:
    """A language model of this config."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    spec = layer(settings, engine=engine)
    prediction = (
        get_gpt_mtp_block_spec(settings, spec, use_transformer_engine=engine) if settings.mtp_num_layers else None
    )
    return GPTModel(
        settings,
        TransformerBlockSubmodules(layer_specs=[spec] * settings.num_layers, layer_norm=CpuNorm),
        VOCABULARY,
        SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
        mtp_block_spec=prediction,
    )


def config(layout: Layout, **settings: Any) -> Any:
    """Megatron's configuration in a layout; see `testing.models.config`."""
    common = layout.config()
    if "num_moe_experts" not in settings:  # Megatron refuses expert parallelism without experts
        common |= {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1}
    return models.config(**common | settings)


def moe_config(layout: Layout, **settings: Any) -> Any:
    """The config of routed and shared experts."""
    moe: dict[str, Any] = {
        "num_moe_experts": EXPERTS,
        "moe_ffn_hidden_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_token_dispatcher_type": "alltoall",
    }
    return config(layout, **moe | settings)


def block(settings: Any, *, engine: bool = False, attention: Any = None) -> Any:
    """A Transformer block of this config, of Transformer Engine's modules or of Megatron's own."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    spec = layer(settings, engine=engine)
    if attention is not None:
        spec.submodules.self_attention = attention
    return TransformerBlock(settings, spec, post_layer_norm=False)


def moe_block(layout: Layout, *, engine: bool = False, **settings: Any) -> Any:
    """A block of routed and shared experts."""
    return block(moe_config(layout, **settings), engine=engine)


def linear_attention_block(layout: Layout, *, engine: bool, conv_bias: bool) -> Any:
    """A block of Gated DeltaNet; Transformer Engine's in_proj has the layer norm in it."""
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear

    linear = (TELayerNormColumnParallelLinear, TERowParallelLinear) if engine else ()
    settings = config(layout, gated_linear_unit=True, **models.LINEAR_ATTENTION)
    return block(settings, engine=engine, attention=models.gated_delta_net(*linear, conv_bias=conv_bias))


def latent_block(layout: Layout, **settings: Any) -> Any:
    """A block of multi-latent attention, of Transformer Engine's modules."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    latent = {
        "kind": MLATransformerConfig,
        "gated_linear_unit": True,
        "rope_type": "rope",
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
    }
    return block(config(layout, **latent | settings), engine=True)


def mamba_layer(layout: Layout, in_proj: type, out_proj: type) -> Any:
    """A layer of Mamba-2."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    mixers = mamba_mixers()
    submodules = mixers.MambaMixerSubmodules(in_proj=in_proj, out_proj=out_proj)
    settings = config(layout, mamba_state_dim=6, mamba_head_dim=8, mamba_num_groups=4)
    return MambaLayer(
        settings,
        MambaLayerSubmodules(norm=CpuNorm, mixer=ModuleSpec(module=mixers.MambaMixer, submodules=submodules)),
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )


def mamba_mixers() -> Any:
    """Megatron's module of `MambaMixer`, which refuses to build without the CUDA-only package mamba_ssm.

    A second copy of the module is loaded that finds a stand-in for what it imports from there: kernels that are never
    called, and the norm's parameter.
    """
    import megatron.core.ssm.mamba_mixer as without_kernels

    if without_kernels.HAVE_MAMBA_SSM:
        return without_kernels
    kernels = ModuleType("mamba_ssm.ops.triton.ssd_combined")
    norms = ModuleType("mamba_ssm.ops.triton.layernorm_gated")
    vars(kernels).update(mamba_chunk_scan_combined=_no_kernel, mamba_split_conv1d_scan_combined=_no_kernel)
    vars(norms).update(RMSNorm=MambaNorm)
    packages = [ModuleType(name) for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton")]
    with patch.dict(sys.modules, {module.__name__: module for module in (*packages, kernels, norms)}):
        spec: Any = find_spec(without_kernels.__name__)
        copy = module_from_spec(spec)
        spec.loader.exec_module(copy)
    return copy


class MambaNorm(torch.nn.Module):
    """The parameter of mamba_ssm's `RMSNorm`, as `mamba_ssm/ops/triton/layernorm_gated.py` has it."""

    def __init__(self, hidden_size: int, device: Any = None, dtype: Any = None, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)


def _no_kernel() -> None:
    raise NotImplementedError("this model is built, not run")


MODELS: dict[str, Builder] = {
    builder.__name__: builder
    for builder in (
        dense_gated,
        experts_gated,
        experts_with_biases,
        interleaved_gated,
        mixed_gating,
        gated_delta_net,
        attention,
        latent_attention,
        latent_attention_fused,
        multi_token_prediction,
        mamba,
        everything,
        tied,
        frozen,
        lora,
        lora_grouped,
        lora_each_expert,
        canonical_lora,
    )
}
