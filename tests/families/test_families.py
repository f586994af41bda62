# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Every family of fused parameters: saved in one layout, loaded in others, compared with Megatron's own checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from testing.ranks import RankFailed
from tests.families.reference import Layout
from tests.families.shelf import Shelf
from tests.soak import sampling
from tests.upstream import is_before


@dataclass(frozen=True, slots=True)
class Family:
    """Where a model is saved and loaded; parts that names on disk must have, and names that must not be there."""

    saved_in: Layout
    loaded_in: dict[str, Layout]
    on_disk: tuple[str, ...]
    not_on_disk: tuple[str, ...] = ()


TWO, FOUR = Layout(2), Layout(4)
TP2, TP2_OF_4, TP4 = Layout(2, tensor=2), Layout(4, tensor=2), Layout(4, tensor=4)
EP2, EP4 = Layout(2, expert=2), Layout(4, expert=4)
TP2_EP2 = Layout(4, tensor=2, expert=2)
TP2_ETP2 = Layout(2, tensor=2, expert_tensor=2)
TP2_EP2_ETP2 = Layout(4, tensor=2, expert=2, expert_tensor=2)

DENSE = {"TP 2": TP2, "1 rank": Layout(), "TP 4": TP4, "4 ranks, TP 2, optim": TP2_OF_4.on(strategy="optim")}
SPREAD = {"2 ranks": TWO, "TP 4": TP4, "4 ranks": FOUR, "TP 2, no_shard": TP2.on(strategy="no_shard")}
EXPERTS = {"EP 2": EP2, "TP 2, ETP 2": TP2_ETP2, "EP 4, no_shard": EP4.on(strategy="no_shard"), "1 rank": Layout()}
GROUPED = {"TP 2": TP2, "EP 2": EP2, "4 ranks, no_shard": FOUR.on(strategy="no_shard"), "TP 2, EP 2": TP2_EP2}

# The shared experts of core 0.18 do not run as a grouped GEMM, and have gate above up.
SHARED = "routed" if is_before("megatron-core", "0.19") else "shared"

FAMILIES: dict[str, Family] = {
    "dense_gated": Family(
        TWO,
        DENSE,
        (
            "swiglu.layers.0.mlp.linear_fc1.weight_w",
            "geglu.layers.0.mlp.linear_fc1.bias_v",
            "ungated.layers.0.mlp.linear_fc1.bias",
            "transformer_engine.layers.0.mlp.linear_fc1.layer_norm_weight",
        ),
        ("swiglu.layers.0.mlp.linear_fc1.weight", "ungated.layers.0.mlp.linear_fc1.weight_w"),
    ),
    "experts_gated": Family(
        TP2_EP2,
        EXPERTS,
        (
            "sequential.layers.0.mlp.experts.local_experts.3.linear_fc1.weight_v",
            "sequential_ungated.layers.0.mlp.experts.local_experts.3.linear_fc1.weight",
            "sequential.layers.0.mlp.shared_experts.linear_fc1.weight_w",
            "grouped.layers.0.mlp.experts.linear_fc1.weight3_w",
            "grouped_ungated.layers.0.mlp.experts.linear_fc1.weight3",
        ),
    ),
    "experts_with_biases": Family(
        EP2,
        {"TP 2, EP 2": TP2_EP2, "EP 4, no_shard": EP4.on(strategy="no_shard"), "1 rank": Layout()},
        (
            "sequential.layers.0.mlp.experts.local_experts.3.linear_fc1.bias_v",
            "grouped.layers.0.mlp.experts.linear_fc1.bias3_w",
        ),
    ),
    "interleaved_gated": Family(
        TWO,
        {"TP 2, ETP 2": TP2_ETP2, "TP 2, EP 2, ETP 2": TP2_EP2_ETP2, "TP 4": TP4, "EP 2": EP2},
        (
            "interleaved_routed.layers.0.mlp.experts.linear_fc1.weight3_w",
            f"interleaved_{SHARED}.layers.0.mlp.shared_experts.linear_fc1.weight_v",
        ),
    ),
    "mixed_gating": Family(
        TP2,
        SPREAD,
        (
            "vision_model.decoder.layers.1.mlp.linear_fc1.bias",
            "language_model.decoder.layers.0.mlp.linear_fc1.weight_v",
        ),
    ),
    "gated_delta_net": Family(
        TP2_OF_4,
        SPREAD,
        (
            "own.layers.0.self_attention.in_proj.weight.beta",
            "own_conv_bias.layers.0.self_attention.conv1d.bias.value",
            "engine.layers.0.self_attention.in_proj.weight.alpha",
            "engine.layers.0.self_attention.in_proj.layer_norm_weight",
        ),
    ),
    "attention": Family(
        TWO, DENSE, ("one_group.layers.0.self_attention.linear_qkv.bias", "engine_output_gate.layers.0.self_attention")
    ),
    "latent_attention": Family(
        TP2, SPREAD, ("linear_q_down_proj.weight", "linear_kv_down_proj.weight", "input_layernorm.weight")
    ),
    "latent_attention_fused": Family(
        TWO,
        DENSE,
        ("linear_q_down_proj.weight", "linear_kv_down_proj.weight", "input_layernorm.weight"),
        ("linear_qkv_down_proj",),
    ),
    "multi_token_prediction": Family(
        TP2_EP2,
        EXPERTS,
        (
            "mtp.layers.1.transformer_layer.mlp.experts.local_experts.3.linear_fc1.weight_w",
            "mtp.layers.0.eh_proj.weight",
        ),
        ("mtp_model_layer",),
    ),
    "mamba": Family(
        TP2,
        SPREAD,
        ("own.mixer.in_proj.weight.dt", "engine.mixer.in_proj.weight.z", "mixer.conv1d", "engine.mixer.norm.weight"),
    ),
}

CROSSED: dict[str, tuple[str, Layout, str, Layout]] = {
    "fused": ("latent_attention", TP2, "latent_attention_fused", Layout()),
    "fused at TP 4": ("latent_attention", TP2, "latent_attention_fused", TP4),
    "unfused": ("latent_attention_fused", TWO, "latent_attention", Layout()),
    "unfused at TP 2": ("latent_attention_fused", TWO, "latent_attention", TP2_OF_4),
}

ADAPTED: dict[str, Family] = {
    "lora": Family(
        TP2_EP2,
        EXPERTS,
        (
            "dense.layers.0.mlp.linear_fc1.adapter.linear_out.weight_w",
            "dense.layers.0.mlp.linear_fc1.adapter.linear_in.weight",
            "dense.layers.0.mlp.linear_fc1.weight_v",
            "linear_attention.layers.0.self_attention.in_proj.adapter.linear_out.weight.beta",
            "linear_attention.layers.0.self_attention.in_proj.weight.beta",
        ),
    ),
    "lora_grouped": Family(TWO, GROUPED, ("grouped.layers.0.mlp.experts.linear_fc1.adapter.linear_out.weight_w",)),
    "canonical_lora": Family(
        TP2_EP2,
        EXPERTS,
        (
            "dense.layers.0.mlp.linear_fc1.adapter.adapter_up.linear_out.weight",
            "dense.layers.0.self_attention.linear_qkv.adapter.adapter_k.linear_out.weight",
        ),
    ),
}


def first_pairs(families: dict[str, Family]) -> list[str]:
    """Each family with its first layout."""
    return [f"{name}-{next(iter(family.loaded_in))}" for name, family in families.items()]


def other_pairs(families: dict[str, Family]) -> list[tuple[str, str]]:
    """Each family with its layouts but the first."""
    return [(name, where) for name, family in families.items() for where in list(family.loaded_in)[1:]]


@pytest.mark.quick
@pytest.mark.parametrize("model", FAMILIES, ids=first_pairs(FAMILIES))
def test_a_family_loads_in_another_layout(model: str, shelf: Shelf) -> None:
    check_first(model, FAMILIES[model], shelf)


@pytest.mark.parametrize(("model", "where"), sampling.drawn("families in layouts", other_pairs(FAMILIES), share=6))
def test_a_family_loads_in_more_layouts(model: str, where: str, shelf: Shelf) -> None:
    family = FAMILIES[model]
    shelf.check(model, family.saved_in, family.loaded_in[where])


@pytest.mark.parametrize("name", sampling.drawn("crossed", list(CROSSED), share=4))
def test_fused_and_unfused_latent_attention_load_each_other(name: str, shelf: Shelf) -> None:
    saved, saved_in, loaded, loaded_in = CROSSED[name]
    if saved == "latent_attention_fused" and is_before("megatron-core", "0.19"):
        pytest.skip("core 0.18 leaves the norm of a fused down projection out of what it saves: there is no reference")
    shelf.check(saved, saved_in, loaded_in, other_model=loaded)


@pytest.mark.bridge
@pytest.mark.parametrize("model", ADAPTED, ids=first_pairs(ADAPTED))
def test_adapters_load_in_another_layout(model: str, bridge_shelf: Shelf) -> None:
    check_first(model, ADAPTED[model], bridge_shelf)


@pytest.mark.bridge
@pytest.mark.parametrize(("model", "where"), sampling.drawn("adapters in layouts", other_pairs(ADAPTED), share=6))
def test_adapters_load_in_more_layouts(model: str, where: str, bridge_shelf: Shelf) -> None:
    family = ADAPTED[model]
    bridge_shelf.check(model, family.saved_in, family.loaded_in[where])


@pytest.mark.bridge
@pytest.mark.parametrize("layout", [TWO, EP2], ids=["2 ranks", "EP 2"])
def test_packed_adapters_of_each_expert_are_refused(layout: Layout, bridge_shelf: Shelf) -> None:
    with pytest.raises(RankFailed, match="share_expert_adapters=True"):
        bridge_shelf.saved("lora_each_expert", layout)


def check_first(model: str, family: Family, shelf: Shelf) -> None:
    """The first layout, and the names on disk, which are those of `fsdp_dtensor`."""
    shelf.check(model, family.saved_in, next(iter(family.loaded_in.values())))
    keys = [key for key in shelf.on_disk(shelf.saved(model, family.saved_in)) if key.startswith("model.")]
    missing = [name for name in family.on_disk if not any(name in key for key in keys)]
    assert not missing, f"not among {keys}"
    assert not [key for key in keys for name in family.not_on_disk if key.endswith(name) or f"{name}." in key]
